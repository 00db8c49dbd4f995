//! CRC-32C of what is put together from parts whose checksums are known.
//!
//! A checksum is a polynomial over GF(2), and to append `n` bytes multiplies it by `x^(8n)` modulo
//! the CRC's polynomial: so the checksum of two parts takes a multiplication for each byte of the
//! length that is not zero, four at most, and no look at their bytes. As in zlib's `crc32_combine`,
//! of which the crate `crc32c` has a translation: that squares matrices with each call, and takes
//! longer than to read what a usual batch has.

/// Castagnoli's (RFC 3720, 12.1), reflected: the highest bit is the coefficient of `x^0`.
const POLYNOMIAL: u32 = 0x82f6_3b78;
const ONE: u32 = 1 << 31;

/// `SHIFTS[j][i]` is `x^(8 i 256^j)`: what `i 256^j` bytes multiply by.
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

/// The product of two polynomials. Without branches: its factors are as good as random.
const fn multiply(mut a: u32, b: u32) -> u32 {
    let mut product = 0;
    let mut power = 0;
    while power < u32::BITS {
        product ^= a & ((b << power) >> 31).wrapping_neg();
        // Times x.
        a = (a >> 1) ^ (POLYNOMIAL & (a & 1).wrapping_neg());
        power += 1;
    }
    product
}

/// The CRC-32C of two parts, one behind the other: from that of the first, that of the second, and
/// the second's length in bytes.
pub fn crc32c_of_both(first: u32, second: u32, second_bytes: u32) -> u32 {
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
    fn of_both_is_of_one_behind_the_other() {
        let bytes: Vec<u8> = (0..1_200_000_u32).map(|i| (i * 7 + i / 251) as u8).collect();
        let lens = [0, 1, 2, 31, 255, 256, 257, 4095, 14_600, 65_535, 65_536, 65_793, 1_100_000];
        for first in [0, 1, 40, 61, 4096] {
            for second in lens {
                let (head, body) = bytes[..first + second].split_at(first);
                let both = crc32c::crc32c(&bytes[..first + second]);
                let (head, body) = (crc32c::crc32c(head), crc32c::crc32c(body));
                assert_eq!(crc32c_of_both(head, body, second as u32), both, "{first}, {second}");
            }
        }
    }

    /// Lengths that no test can afford to have bytes for, by other code.
    #[test]
    fn each_byte_of_a_length_counts() {
        for bits in 0..u32::BITS {
            let with_lower_ones = u32::MAX >> bits;
            for len in [1 << bits, with_lower_ones, !(1 << bits)] {
                let (first, second) = (0x1234_5678 ^ len, 0x9abc_def0);
                let both = crc32c::crc32c_combine(first, second, len as usize);
                assert_eq!(crc32c_of_both(first, second, len), both, "{len}");
            }
        }
    }
}
