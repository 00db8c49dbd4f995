//! Unix sockets that a server listens on.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use tokio::net::UnixListener;

/// Binds a socket. Replaces one that a process has left behind: the caller ensures that no process
/// serves it.
///
/// # Errors
/// `path` is a file of another kind, which is kept; or the socket cannot be created.
pub(crate) fn bind(path: &Path) -> io::Result<UnixListener> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => fs::remove_file(path)?,
        Ok(_) => return Err(io::Error::other("the path exists and is not a socket")),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    UnixListener::bind(path)
}
