//! Bodies of messages: by length, in chunks, or up to the end of the connection.

/// Longest extension of a chunk, and all of the trailers.
const MAX_EXTENSION: usize = 256;
const MAX_TRAILERS: usize = 8 << 10;
/// Of a chunk's size.
const MAX_DIGITS: usize = 15;

/// What is still to come of a body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decoder {
    Length(u64),
    Chunks(Chunks),
    UntilEnd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chunks {
    Size { digits: usize, size: u64 },
    Extension { length: usize, size: u64 },
    SizeLf { size: u64 },
    Data { left: u64 },
    DataCr,
    DataLf,
    Trailers { line: usize, total: usize },
    TrailerLf { line: usize, total: usize },
    Done,
}

const NEXT: Chunks = Chunks::Size { digits: 0, size: 0 };

impl Decoder {
    pub fn chunked() -> Self {
        Self::Chunks(NEXT)
    }

    pub fn of_length(length: u64) -> Self {
        Self::Length(length)
    }

    /// All of it has come.
    pub fn is_done(&self) -> bool {
        matches!(self, Self::Length(0) | Self::Chunks(Chunks::Done))
    }

    /// Whether the end of the connection is its end, too.
    pub fn ends_with_connection(&self) -> bool {
        *self == Self::UntilEnd || self.is_done()
    }

    /// Decodes what came; returns how much of it was of the body.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<usize, &'static str> {
        match self {
            Self::Length(left) => {
                let taken = usize::try_from(*left).map_or(input.len(), |left| left.min(input.len()));
                out.extend_from_slice(&input[..taken]);
                *left -= taken as u64;
                Ok(taken)
            }
            Self::UntilEnd => {
                out.extend_from_slice(input);
                Ok(input.len())
            }
            Self::Chunks(state) => {
                let mut at = 0;
                while at < input.len() && *state != Chunks::Done {
                    if let Chunks::Data { left } = state {
                        let here = &input[at..];
                        let taken = usize::try_from(*left).map_or(here.len(), |left| left.min(here.len()));
                        out.extend_from_slice(&here[..taken]);
                        *left -= taken as u64;
                        at += taken;
                        if *left == 0 {
                            *state = Chunks::DataCr;
                        }
                    } else {
                        *state = state.next(input[at])?;
                        at += 1;
                    }
                }
                Ok(at)
            }
        }
    }
}

impl Chunks {
    fn next(self, byte: u8) -> Result<Self, &'static str> {
        Ok(match (self, byte) {
            (Self::Size { digits, size }, b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F') if digits < MAX_DIGITS => {
                let digit = (byte as char).to_digit(16).expect("matched");
                Self::Size { digits: digits + 1, size: size << 4 | u64::from(digit) }
            }
            (Self::Size { digits: 1.., size }, b';' | b' ' | b'\t') => Self::Extension { length: 0, size },
            (Self::Size { digits: 1.., size } | Self::Extension { size, .. }, b'\r') => Self::SizeLf { size },
            (Self::Extension { length, size }, b'\t' | b' '..) if length < MAX_EXTENSION => {
                Self::Extension { length: length + 1, size }
            }
            (Self::SizeLf { size: 0 }, b'\n') => Self::Trailers { line: 0, total: 0 },
            (Self::SizeLf { size }, b'\n') => Self::Data { left: size },
            (Self::DataCr, b'\r') => Self::DataLf,
            (Self::DataLf, b'\n') => NEXT,
            (Self::Trailers { line, total }, b'\r') => Self::TrailerLf { line, total },
            (Self::Trailers { line, total }, b'\t' | b' '..) if total < MAX_TRAILERS => {
                Self::Trailers { line: line + 1, total: total + 1 }
            }
            (Self::TrailerLf { line: 0, .. }, b'\n') => Self::Done,
            (Self::TrailerLf { total, .. }, b'\n') => Self::Trailers { line: 0, total },
            _ => return Err("chunks that make no sense"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Body and how much was taken, whatever the chunks.
    fn decoded(input: &[u8]) -> Option<(Vec<u8>, usize)> {
        let mut results = (1..=input.len().max(1)).map(|size| {
            let (mut decoder, mut body, mut taken) = (Decoder::chunked(), Vec::new(), 0);
            for chunk in input.chunks(size) {
                let here = decoder.decode(chunk, &mut body).ok()?;
                taken += here;
                if here < chunk.len() {
                    break;
                }
            }
            decoder.is_done().then_some((body, taken))
        });
        let first = results.next().expect("there is a size");
        assert!(results.all(|other| other == first));
        first
    }

    #[test]
    fn chunks_are_decoded() {
        let input = b"3\r\nabc\r\nA;x=\"y\"\r\n0123456789\r\n000\r\nX: 1\r\nY: 2\r\n\r\nrest";
        assert_eq!(decoded(input), Some((b"abc0123456789".to_vec(), input.len() - 4)));
    }

    #[test]
    fn chunks_that_make_no_sense_are_refused() {
        for input in [
            "\r\n",
            "x\r\n",
            "-1\r\n",
            "+1\r\na",
            "0x1\r\na",
            " 1\r\na",
            "1\na",
            "1\r\nab",
            "1\r\na\n0\r\n\r\n",
            "1\r\r\na",
            "ffffffffffffffff\r\n",
            "0\r\n\n",
            "0\r\nX\n\r\n",
            "1;\n\r\na",
            "1\r\na\rX",
        ] {
            let mut decoder = Decoder::chunked();
            assert!(decoder.decode(input.as_bytes(), &mut Vec::new()).is_err(), "{input:?}");
        }
        let endless = [b"1;".as_slice(), &[b'x'; 300]].concat();
        assert!(Decoder::chunked().decode(&endless, &mut Vec::new()).is_err());
        let endless = [b"0\r\n".as_slice(), &[b'x'; 9000]].concat();
        assert!(Decoder::chunked().decode(&endless, &mut Vec::new()).is_err());
    }

    #[test]
    fn a_length_takes_what_is_its_own() {
        let (mut decoder, mut body) = (Decoder::of_length(3), Vec::new());
        assert_eq!(decoder.decode(b"ab", &mut body), Ok(2));
        assert!(!decoder.is_done());
        assert_eq!(decoder.decode(b"cde", &mut body), Ok(1));
        assert!(decoder.is_done());
        assert_eq!(body, b"abc");
    }
}
