//! CRC-32C of a concatenation from the checksums of its parts.
//!
//! A checksum is a polynomial over GF(2), and appending `n` bytes multiplies it by `x^(8n)` modulo
//! the CRC's polynomial. The checksum of two parts therefore takes one multiplication per non-zero
//! byte of the length, four at most, without reading the parts. zlib's `crc32_combine`, of which
//! the crate `crc32c` has a translation, squares matrices with each call, which takes longer than
//! reading a usual batch.

/// Castagnoli's polynomial (RFC 3720, 12.1), reflected: the highest bit is the coefficient of
/// `x^0`.
const POLYNOMIAL: u32 = 0x82f6_3b78;
const ONE: u32 = 1 << 31;

/// `SHIFTS[j][i]` is `x^(8 i 256^j)`, the factor for `i 256^j` appended bytes.
static SHIFTS: [[u32; 256]; 4] = shifts();

const fn shifts() -> [[u32; 256]; 4] {
    let mut shifts = [[ONE; 256]; 4];
    // x^8
    let mut step = ONE >> 8;
    let mut byte = 0;
    while byte < shifts.len() {
        let mut value = 1;
        while value < 256 {
            shifts[byte][value] = multiply(shifts[byte][value - 1], step);
            value += 1;
        }
        step = multiply(shifts[byte][255], step);
        byte += 1;
    }
    shifts
}

/// The product of two polynomials. Branch-free, since its factors are as good as random.
const fn multiply(mut a: u32, b: u32) -> u32 {
    let mut product = 0;
    let mut power = 0;
    while power < u32::BITS {
        product ^= a & ((b << power) >> 31).wrapping_neg();
        // Multiply by x.
        a = (a >> 1) ^ (POLYNOMIAL & (a & 1).wrapping_neg());
        power += 1;
    }
    product
}

/// Returns the CRC-32C of the concatenation of two parts, from the checksum of each and the length
/// of the second in bytes.
pub fn crc32c_concat(first: u32, second: u32, second_bytes: u32) -> u32 {
    let bytes = second_bytes.to_le_bytes();
    let shift = |crc, (shifts, byte): (&[u32; 256], u8)| match byte {
        0 => crc,
        byte => multiply(crc, shifts[usize::from(byte)]),
    };
    SHIFTS.iter().zip(bytes).fold(first, shift) ^ second
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_combined_checksum_is_that_of_the_concatenation() {
        let bytes: Vec<u8> = (0..1_200_000_u32).map(|i| (i * 7 + i / 251) as u8).collect();
        let lens = [0, 1, 2, 31, 255, 256, 257, 4095, 14_600, 65_535, 65_536, 65_793, 1_100_000];
        for first in [0, 1, 40, 61, 4096] {
            for second in lens {
                let (head, body) = bytes[..first + second].split_at(first);
                let both = crc32c::crc32c(&bytes[..first + second]);
                let (head, body) = (crc32c::crc32c(head), crc32c::crc32c(body));
                assert_eq!(crc32c_concat(head, body, second as u32), both, "{first}, {second}");
            }
        }
    }

    /// Lengths too large to test with actual bytes, computed in another way.
    #[test]
    fn each_byte_of_a_length_counts() {
        for bits in 0..u32::BITS {
            let with_lower_ones = u32::MAX >> bits;
            for len in [1 << bits, with_lower_ones, !(1 << bits)] {
                let (first, second) = (0x1234_5678 ^ len, 0x9abc_def0);
                let both = crc32c::crc32c_combine(first, second, len as usize);
                assert_eq!(crc32c_concat(first, second, len), both, "{len}");
            }
        }
    }
}
