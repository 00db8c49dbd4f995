//! The available memory: that of the machine, or the limit of the process's control group.

use std::fs;
use std::path::Path;

use crate::units::{Size, about};

/// Where memory controllers are mounted, and the files of their limits: version 2, which has an
/// empty list of controllers, and version 1.
const GROUPS_V2: (&str, &str) = ("sys/fs/cgroup", "memory.max");
const GROUPS_V1: (&str, &str) = ("sys/fs/cgroup/memory", "memory.limit_in_bytes");

/// The memory that a process may use, and the source of that limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Limit {
    bytes: u64,
    source: &'static str,
}

/// Logs a warning if journals are given more memory than there is: it is allocated on use, so that
/// nothing fails before it is too late.
pub(super) fn check(wanted: Size) {
    if let Some(excess) = limit(Path::new("/")).and_then(|limit| excess(wanted, limit)) {
        tracing::warn!("{excess}");
    }
}

fn excess(wanted: Size, Limit { bytes, source }: Limit) -> Option<String> {
    (wanted.bytes > bytes).then(|| {
        format!(
            "--memory is {wanted}, and {source} {}: the system will kill the process when it uses \
             that much; the index and other memory come on top of --memory",
            about(bytes)
        )
    })
}

/// Returns the lowest limit of the system whose files are under `root`; `None` if there is no
/// information.
fn limit(root: &Path) -> Option<Limit> {
    let machine = machine_bytes(root).map(|bytes| Limit { bytes, source: "the machine has" });
    let group = group_bytes(root)
        .map(|bytes| Limit { bytes, source: "the cgroup of this process permits" });
    machine.into_iter().chain(group).min_by_key(|limit| limit.bytes)
}

fn machine_bytes(root: &Path) -> Option<u64> {
    let text = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = total.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}

/// Returns the lowest limit of the process's groups and their ancestors, as far as they are
/// visible: in a container the path may be that of the host, and the container's own group is the
/// mount point.
fn group_bytes(root: &Path) -> Option<u64> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let limit = |line: &str| {
        // A number, controllers, a path.
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        let (mount, file) = match controllers {
            "" => GROUPS_V2,
            some if some.split(',').any(|it| it == "memory") => GROUPS_V1,
            _ => return None,
        };
        let mount = root.join(mount);
        let group = mount.join(path.trim_start_matches('/'));
        let groups = group.ancestors().take_while(|it| it.starts_with(&mount));
        // `max` is not a number, and means no limit.
        let of_group =
            |it: &Path| fs::read_to_string(it.join(file)).ok()?.trim().parse::<u64>().ok();
        groups.filter_map(of_group).min()
    };
    groups.lines().filter_map(limit).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the limit on a system with these files.
    fn limit_with(files: &[(&str, &str)]) -> Option<Limit> {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        limit(root.path())
    }

    #[test]
    fn the_lowest_memory_limit_counts() {
        let machine = ("proc/meminfo", "MemTotal:       16384 kB\nMemFree:   1 kB\n");
        let of_machine = Some(Limit { bytes: 16 << 20, source: "the machine has" });
        let of_group = |bytes| Some(Limit { bytes, source: "the cgroup of this process permits" });
        assert_eq!(limit_with(&[]), None);
        assert_eq!(limit_with(&[machine]), of_machine);

        let v2 = ("proc/self/cgroup", "0::/system.slice/cache.service\n");
        let slice = "sys/fs/cgroup/system.slice/memory.max";
        let service = "sys/fs/cgroup/system.slice/cache.service/memory.max";
        assert_eq!(limit_with(&[machine, v2, (slice, "max\n"), (service, "max\n")]), of_machine);
        let limited = [machine, v2, (slice, "1000000\n"), (service, "max\n")];
        assert_eq!(limit_with(&limited), of_group(1_000_000));
        let limited = [machine, v2, (slice, "1000000\n"), (service, "999999\n")];
        assert_eq!(limit_with(&limited), of_group(999_999));
        let container =
            [machine, ("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/memory.max", "4096\n")];
        assert_eq!(limit_with(&container), of_group(4096));

        let v1 = ("proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/docker/1f\n0::/\n");
        let none = "9223372036854771712\n";
        let root = "sys/fs/cgroup/memory/memory.limit_in_bytes";
        let group = "sys/fs/cgroup/memory/docker/1f/memory.limit_in_bytes";
        assert_eq!(limit_with(&[machine, v1, (root, none), (group, none)]), of_machine);
        assert_eq!(limit_with(&[machine, v1, (root, none), (group, "5000")]), of_group(5000));
        // Seen from inside, with the name that it has outside.
        assert_eq!(limit_with(&[machine, v1, (root, "6000\n")]), of_group(6000));
    }

    #[test]
    fn the_warning_names_both_sizes() {
        let limit = Limit { bytes: 3 << 29, source: "the machine has" };
        assert_eq!(excess(Size::gib(1), limit), None);
        let warning = excess(Size::gib(2), limit).unwrap();
        assert!(warning.contains("--memory is 2GiB, and the machine has 1.5 GiB"), "{warning}");
        assert!(machine_bytes(Path::new("/")).is_some_and(|bytes| bytes > 64 << 20));
    }
}
