//! The form in which passwords are given in files and on standard input.

/// Returns the password in a text: its first line.
///
/// # Errors
/// The line is empty.
pub(crate) fn first_line(text: &[u8]) -> Result<&[u8], &'static str> {
    let line = text.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let password = line.strip_suffix(b"\r").unwrap_or(line);
    match password.is_empty() {
        true => Err("the password is empty"),
        false => Ok(password),
    }
}

#[cfg(test)]
mod tests {
    use super::first_line;

    #[test]
    fn a_password_is_the_first_line_without_its_end() {
        for text in ["secret", "secret\n", "secret\r\nmore\n", "secret\n\n"] {
            assert_eq!(first_line(text.as_bytes()), Ok(&b"secret"[..]), "{text:?}");
        }
        for text in ["", "\n", "\r\n", "\nsecret"] {
            assert!(first_line(text.as_bytes()).is_err(), "{text:?}");
        }
    }
}
