//! The iteration order of a Java `HashMap`.
//!
//! Kafka answers some requests in the order of such a map. The order depends on the keys and their
//! number only, so clients' tests compare lists with recorded ones.

/// A map's default capacity.
pub(crate) const MIN_CAPACITY: usize = 16;

/// `String.hashCode`.
pub(crate) fn hash(text: &str) -> u32 {
    text.encode_utf16().fold(0_u32, |hash, unit| hash.wrapping_mul(31).wrapping_add(unit.into()))
}

/// Sorts elements as a map iterates over them, by their `hashCode`. Elements that share a bucket,
/// which a map keeps in order of insertion, keep their present order.
pub(crate) fn sort<T>(elements: &mut [T], min_capacity: usize, hash: impl Fn(&T) -> u32) {
    let mut buckets = min_capacity;
    // A table is doubled when more than three quarters of it are occupied.
    while elements.len() > buckets / 4 * 3 + buckets % 4 * 3 / 4 {
        buckets *= 2;
    }
    elements.sort_by_key(|element| {
        let hash = hash(element);
        (hash ^ hash >> 16) as usize & (buckets - 1)
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected orders are those that Java 17 prints.
    #[test]
    fn elements_are_sorted_as_by_java() {
        assert_eq!(hash("controller_mutation_rate"), 0xd35d_6953);
        assert_eq!(hash("\u{e4}\u{1f600}"), 0x1e_6547);
        let sorted = |names: &str, min_capacity| {
            let mut names: Vec<&str> = names.split(' ').collect();
            sort(&mut names, min_capacity, |name| hash(name));
            names.join(" ")
        };
        assert_eq!(sorted("sa sm su zzz", MIN_CAPACITY), "su sm zzz sa");
        // More than three quarters of 16.
        let many = (0..14).map(|n| format!("user-{n}")).collect::<Vec<_>>().join(" ");
        assert_eq!(
            sorted(&many, MIN_CAPACITY),
            "user-1 user-0 user-5 user-11 user-4 user-12 user-3 user-2 user-10 user-9 user-8 \
             user-7 user-13 user-6"
        );
    }
}
