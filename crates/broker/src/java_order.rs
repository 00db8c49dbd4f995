//! The order of the elements of a Java `HashMap`.
//!
//! Kafka answers some requests in the order of such a map. It is a function of the keys and of how
//! many there are, so clients' tests compare lists with what they have seen once.

/// The table that a map has from its first element on unless it is told otherwise.
pub(crate) const MIN_CAPACITY: usize = 16;

/// `String.hashCode`.
pub(crate) fn hash(text: &str) -> u32 {
    text.encode_utf16().fold(0_u32, |hash, unit| hash.wrapping_mul(31).wrapping_add(unit.into()))
}

/// Sort as a map has its elements, by their `hashCode`. Those that share a bucket, which a map has
/// in the order in which they came, stay in the present order.
pub(crate) fn sort<T>(elements: &mut [T], min_capacity: usize, hash: impl Fn(&T) -> u32) {
    let mut buckets = min_capacity;
    // A table is doubled when more than three quarters of it are taken.
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

    /// As Java 17 prints the keys of maps.
    #[test]
    fn the_order_is_that_of_java() {
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
            "user-1 user-0 user-5 user-11 user-4 user-12 user-3 user-2 user-10 user-9 user-8 user-7 \
             user-13 user-6"
        );
    }
}
