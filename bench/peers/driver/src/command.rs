//! Lines of the protocol: `verb key=value ...`.

use std::collections::HashMap;
use std::str::FromStr;

pub struct Command<'l> {
    pub verb: &'l str,
    arguments: HashMap<&'l str, &'l str>,
}

impl<'l> Command<'l> {
    pub fn parse(line: &'l str) -> Result<Self, String> {
        let mut words = line.split_ascii_whitespace();
        let verb = words.next().ok_or("an empty line")?;
        let arguments = words
            .map(|word| word.split_once('=').ok_or_else(|| format!("{word}: not key=value")))
            .collect::<Result<_, _>>()?;
        Ok(Self { verb, arguments })
    }

    pub fn text(&self, key: &str) -> Result<&'l str, String> {
        self.arguments.get(key).copied().ok_or_else(|| format!("{}: {key} is missing", self.verb))
    }

    pub fn number<N: FromStr>(&self, key: &str) -> Result<N, String> {
        let text = self.text(key)?;
        text.parse().map_err(|_| format!("{key}={text}: not a number of its kind"))
    }

    /// A number of at least 1.
    pub fn positive(&self, key: &str) -> Result<u64, String> {
        match self.number(key)? {
            0 => Err(format!("{key}: must be at least 1")),
            number => Ok(number),
        }
    }
}
