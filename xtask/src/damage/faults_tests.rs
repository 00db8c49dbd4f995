use super::*;

#[test]
fn a_seed_determines_the_plan_and_every_plan_changes_the_file() {
    let bytes: Vec<u8> = (0..40_960_u32).map(|at| (at % 251) as u8).collect();
    let names = ["chain/0000000000000001", "chain/0000000000000002", "snapshots/1-2", "about"];
    let names = names.map(|name| format!("{CATALOGS}/store/{name}"));
    let content = |name: &String| (name.clone(), Content::new(bytes.clone()));
    let files = Files(names.iter().map(content).collect());
    let earlier = Files(names[..1].iter().map(content).collect());
    let target = Target { files: &files, earlier: &earlier };
    for fault in FAULTS.iter().filter(|fault| fault.name.starts_with("catalog: ")) {
        assert!((0..20).any(|seed| (fault.plan)(&target, &mut Rng::new(seed)).is_some()));
        for seed in 0..20 {
            let plan = (fault.plan)(&target, &mut Rng::new(seed));
            let again = (fault.plan)(&target, &mut Rng::new(seed));
            let edits = |plan: &Option<Plan>| plan.as_ref().map(|plan| plan.edits.clone());
            assert_eq!(edits(&plan), edits(&again), "{}, seed {seed}", fault.name);
            for edit in edits(&plan).into_iter().flatten() {
                if let Edit::Write { at, bytes: written, .. } = edit {
                    let there = bytes.get(at as usize..at as usize + written.len());
                    assert_ne!(there, Some(&written[..]), "{}, seed {seed}", fault.name);
                }
            }
        }
    }
}

#[test]
fn only_objects_before_a_snapshot_are_not_needed() {
    let name = |name: &str| format!("{CATALOGS}/store/{name}");
    let [chain, newest] = ["chain/0000000000000007", "chain/0000000000000009"].map(name);
    let snapshot = name("snapshots/0000000000000009-2");
    let content = |name: &String| (name.clone(), Content::new(vec![1; 10]));
    let files = Files([&chain, &newest, &snapshot].map(content).into());
    let target = Target { files: &files, earlier: &files };
    let plan = damages_chain(&target, &[&chain], Plan::default());
    assert!(plan.must_start);
    let plan = damages_chain(&target, &[&chain, &newest], Plan::default());
    assert!(!plan.must_start);
    assert_eq!(plan.named[1], "catalogs/store/chain/0000000000000009");
    assert_eq!(plan.reach, Some(BTreeSet::new()));
}

#[test]
fn names_are_unique() {
    let names: BTreeSet<&str> = FAULTS.iter().map(|fault| fault.name).collect();
    assert_eq!(names.len(), FAULTS.len());
}
