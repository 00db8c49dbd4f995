//! Import cycles between the modules of a crate.
//!
//! A module is a file. It depends on the modules that its paths name (`crate::a::Item`,
//! `super::b`), in `use` declarations and elsewhere. An item that a module re-exports with `use`
//! counts as an item of the module that has it. Paths between a module and its own ancestors do not
//! count, since a child is a part of its parent. Files of tests are left out.

use std::collections::{BTreeMap, BTreeSet};

use super::source::{File, Kind, Token, Tree};
use super::{Finding, Rule, Violation};

/// A module by the segments of its path; the root of the crate has none.
type Module = Vec<String>;

/// What a module takes from elsewhere: the full path, the name that it gets here, and the line.
struct Import {
    path: Module,
    name: String,
    line: usize,
    /// Whether it is a `use` declaration that others can see.
    re_exported: bool,
}

/// The largest import cycle of each crate that has one.
pub(super) fn largest(tree: &Tree) -> Vec<Finding> {
    let mut crates = BTreeMap::<String, Vec<&File>>::new();
    for file in tree.rust().filter(|file| !file.is_test()) {
        if let Some((source, _)) = file.path.split_once("/src/") {
            crates.entry(format!("{source}/src")).or_default().push(file);
        }
    }
    crates.into_iter().filter_map(|(source, files)| of_crate(&source, &files)).collect()
}

fn of_crate(source: &str, files: &[&File]) -> Option<Finding> {
    let modules: BTreeMap<Module, &File> =
        files.iter().map(|file| (module(source, &file.path), *file)).collect();
    let is_child = |module: &Module, name: &str| {
        let path: Module = module.iter().cloned().chain([name.to_owned()]).collect();
        modules.contains_key(&path)
    };
    let imports: BTreeMap<&Module, Vec<Import>> = modules
        .iter()
        .map(|(module, file)| {
            (module, imports(module, &file.code(), |name| is_child(module, name)))
        })
        .collect();
    let mut edges = BTreeMap::<&Module, BTreeMap<&Module, usize>>::new();
    for (module, list) in &imports {
        for import in list.iter().filter(|import| !import.re_exported) {
            let target = resolve(&import.path, &modules, &imports, 8);
            let is_own = |other: &Module| other.starts_with(module) || module.starts_with(other);
            if let Some(target) = target.filter(|target| !is_own(target)) {
                edges.entry(module).or_default().entry(target).or_insert(import.line);
            }
        }
    }
    let cycle = components(&edges).into_iter().max_by_key(BTreeSet::len)?;
    let value = cycle.len();
    if value < 2 {
        return None;
    }
    let mut violations = vec![];
    for from in &cycle {
        let Some(targets) = edges.get(*from) else { continue };
        for (to, line) in targets.iter().filter(|(to, _)| cycle.contains(*to)) {
            let to = if to.is_empty() { "the root".to_owned() } else { to.join("::") };
            violations.push(Violation {
                file: modules[*from].path.clone(),
                line: *line,
                what: format!("imports {to}, in a cycle of {value} modules"),
            });
        }
    }
    Some(Finding { rule: Rule::Cycle, file: source.to_owned(), value, violations })
}

/// `crates/x/src/a/b.rs` is `a::b`, and so is `crates/x/src/a/b/mod.rs`.
fn module(source: &str, path: &str) -> Module {
    let inner = path.strip_prefix(source).unwrap_or(path).trim_start_matches('/');
    let inner = inner.trim_end_matches(".rs");
    let mut segments: Module = inner.split('/').map(str::to_owned).collect();
    if matches!(segments.last().map(String::as_str), Some("mod" | "lib" | "main")) {
        segments.pop();
    }
    segments
}

/// The module that has what `path` names: the longest prefix that is a module, or, where that one
/// only re-exports the next segment, the module from which it does.
fn resolve<'a>(
    path: &Module,
    modules: &'a BTreeMap<Module, &File>,
    imports: &BTreeMap<&Module, Vec<Import>>,
    depth: usize,
) -> Option<&'a Module> {
    let known = (0..=path.len()).rev().find(|end| modules.contains_key(&path[..*end]))?;
    let (module, _) = modules.get_key_value(&path[..known])?;
    let re_export = path.get(known).filter(|_| depth > 0).and_then(|name| {
        let list = imports.get(module)?;
        list.iter().find(|import| import.re_exported && import.name == *name)
    });
    match re_export {
        Some(import) => resolve(&import.path, modules, imports, depth - 1),
        None => Some(module),
    }
}

/// The paths of a file that begin with `crate`, `super`, `self` or a child of the module, with
/// lists taken apart.
fn imports(module: &Module, tokens: &[&Token], is_child: impl Fn(&str) -> bool) -> Vec<Import> {
    let mut imports = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let token = tokens[at];
        let is_start = matches!(token.text.as_str(), "crate" | "super" | "self")
            || (is_child(&token.text) && (at == 0 || tokens[at - 1].text != ":"));
        if !(is_start && is_path(tokens, at + 1)) {
            at += 1;
            continue;
        }
        let is_use = at > 0 && tokens[at - 1].text == "use";
        let re_exported = is_use && at > 1 && matches!(tokens[at - 2].text.as_str(), "pub" | ")");
        let mut base = module.clone();
        let mut next = at;
        loop {
            match tokens[next].text.as_str() {
                "crate" => base = Module::new(),
                "super" => {
                    base.pop();
                }
                "self" => {}
                _ => break,
            }
            if !is_path(tokens, next + 1) {
                break;
            }
            next += 3;
        }
        let mut found = Vec::new();
        at = names(tokens, next, base, &mut found).max(at + 1);
        imports.extend(found.into_iter().map(|(path, name)| Import {
            path,
            name,
            line: token.line,
            re_exported,
        }));
    }
    imports
}

fn is_path(tokens: &[&Token], at: usize) -> bool {
    tokens.get(at..at + 2).is_some_and(|two| two.iter().all(|token| token.text == ":"))
}

/// Reads a path, or a list of paths in braces, that follows `base`, and returns where it ends.
fn names(
    tokens: &[&Token],
    mut at: usize,
    mut base: Module,
    found: &mut Vec<(Module, String)>,
) -> usize {
    while let Some(token) = tokens.get(at) {
        match token.text.as_str() {
            "{" => {
                at += 1;
                while let Some(token) = tokens.get(at) {
                    match token.text.as_str() {
                        "}" => return at + 1,
                        "," => at += 1,
                        _ => {
                            let end = names(tokens, at, base.clone(), found);
                            at = end.max(at + 1);
                        }
                    }
                }
                return at;
            }
            "self" => {
                let name = base.last().cloned().unwrap_or_default();
                found.push((base, name));
                return at + 1;
            }
            "*" => {
                found.push((base, "*".to_owned()));
                return at + 1;
            }
            _ if token.kind == Kind::Name => {
                base.push(token.text.clone());
                at += 1;
                if is_path(tokens, at) {
                    at += 2;
                    continue;
                }
                let mut name = token.text.clone();
                if tokens.get(at).is_some_and(|token| token.text == "as") {
                    name = tokens.get(at + 1).map_or(name, |token| token.text.clone());
                    at += 2;
                }
                found.push((base, name));
                return at;
            }
            _ => return at,
        }
    }
    at
}

/// The strongly connected components of a graph: sets of modules that reach each other.
fn components<'a>(
    edges: &BTreeMap<&'a Module, BTreeMap<&'a Module, usize>>,
) -> Vec<BTreeSet<&'a Module>> {
    let reach = |from: &'a Module| {
        let mut seen = BTreeSet::new();
        let mut open = vec![from];
        while let Some(module) = open.pop() {
            for next in edges.get(module).into_iter().flat_map(BTreeMap::keys) {
                if seen.insert(*next) {
                    open.push(next);
                }
            }
        }
        seen
    };
    // A crate has some hundred modules at most.
    let reached: BTreeMap<&Module, BTreeSet<&Module>> =
        edges.keys().map(|module| (*module, reach(module))).collect();
    let mut components = Vec::<BTreeSet<&Module>>::new();
    for (module, seen) in &reached {
        if components.iter().any(|component| component.contains(module)) {
            continue;
        }
        let mut component: BTreeSet<&Module> = seen
            .iter()
            .filter(|other| reached.get(*other).is_some_and(|back| back.contains(module)))
            .copied()
            .collect();
        component.insert(module);
        components.push(component);
    }
    components
}
