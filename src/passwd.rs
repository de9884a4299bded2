//! Users of the system by name, as `/etc/passwd` lists them.

/// User and group of a name, from the text of `/etc/passwd`.
pub fn ids_of(passwd: &str, name: &str) -> Option<(u32, u32)> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next()? == name).then_some(())?;
        Some((fields.nth(1)?.parse().ok()?, fields.next()?.parse().ok()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_read_from_the_passwd_file() {
        let passwd =
            "root:x:0:0:root:/root:/bin/sh\npostgresx:x:1:2::/:/bin/sh\npostgres:x:101:104:,,:/:/bin/sh\n";
        assert_eq!(ids_of(passwd, "postgres"), Some((101, 104)));
        assert_eq!(ids_of(passwd, "nobody"), None);
    }
}
