//! gRPC's framing of messages: one byte that says whether it is compressed, four of length, the message.

use std::io::Read;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use flate2::read::GzDecoder;

use super::status::{FULL, INTERNAL, RESOURCE_EXHAUSTED, Status, UNIMPLEMENTED};

/// Bytes before each message.
pub const PREFIX: usize = 5;

/// How the peer compresses, if it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    Identity,
    Gzip,
    Unknown,
}

impl Encoding {
    pub fn named(name: Option<&[u8]>) -> Self {
        match name {
            None | Some(b"identity") => Self::Identity,
            Some(b"gzip") => Self::Gzip,
            Some(_) => Self::Unknown,
        }
    }
}

/// A message with its prefix.
pub fn framed(message: &[u8]) -> Bytes {
    let mut frame = BytesMut::with_capacity(PREFIX + message.len());
    frame.put_u8(0);
    frame.put_u32(u32::try_from(message.len()).expect("a message shorter than 4 GiB"));
    frame.put_slice(message);
    frame.freeze()
}

/// Makes messages of the bytes of one direction of a stream.
#[derive(Debug)]
pub struct Deframer {
    /// Bytes that were pushed and not looked at.
    pushed: Bytes,
    /// Beginning of a message whose end is not among them.
    partial: BytesMut,
    max_message: usize,
    encoding: Encoding,
    /// Bytes that may still come out of compressed messages: a few of theirs, which a window lets through, hold much.
    pub room: usize,
}

impl Deframer {
    pub fn new(max_message: usize, encoding: Encoding) -> Self {
        Self { pushed: Bytes::new(), partial: BytesMut::new(), max_message, encoding, room: usize::MAX }
    }

    pub fn set_encoding(&mut self, encoding: Encoding) {
        self.encoding = encoding;
    }

    /// Forgets what was pushed.
    pub fn clear(&mut self) {
        (self.pushed, self.partial) = (Bytes::new(), BytesMut::new());
    }

    /// Bytes that were pushed and not returned.
    pub fn held(&self) -> usize {
        self.pushed.len() + self.partial.len()
    }

    /// Whether the last message is incomplete. Known once `next_message` has returned `None`.
    pub fn is_partial(&self) -> bool {
        self.pushed.is_empty() && !self.partial.is_empty()
    }

    /// Adds bytes, once `next_message` has returned `None`.
    pub fn push(&mut self, bytes: Bytes) {
        debug_assert!(self.pushed.is_empty(), "there may be a message in what was pushed before");
        self.pushed = bytes;
    }

    /// Returns the next complete message, if there is one. One that came in one push is not copied.
    ///
    /// # Errors
    /// The bytes are no gRPC frames, or a message is too long or cannot be inflated. Nothing can follow.
    pub fn next_message(&mut self) -> Result<Option<Bytes>, Status> {
        if self.partial.is_empty() {
            if let Some(length) = self.length(&self.pushed)?
                && self.pushed.len() >= PREFIX + length
            {
                let frame = self.pushed.split_to(PREFIX + length);
                return self.message(frame[0] != 0, frame.slice(PREFIX..)).map(Some);
            }
            self.complete(usize::MAX);
            return Ok(None);
        }
        self.complete(PREFIX);
        let Some(length) = self.length(&self.partial)? else { return Ok(None) };
        self.complete(PREFIX + length);
        if self.partial.len() < PREFIX + length {
            return Ok(None);
        }
        let mut frame = std::mem::take(&mut self.partial).freeze();
        let compressed = frame[0] != 0;
        frame.advance(PREFIX);
        self.message(compressed, frame).map(Some)
    }

    /// Moves bytes to the incomplete message until it has a length.
    fn complete(&mut self, length: usize) {
        let missing = length.saturating_sub(self.partial.len()).min(self.pushed.len());
        self.partial.extend_from_slice(&self.pushed.split_to(missing));
    }

    fn length(&self, bytes: &[u8]) -> Result<Option<usize>, Status> {
        let Some((&[flag, a, b, c, d], _)) = bytes.split_first_chunk::<PREFIX>() else { return Ok(None) };
        if flag > 1 {
            return Err(Status::new(
                INTERNAL,
                format!("a message begins with {flag}, which is not a gRPC frame"),
            ));
        }
        let length = u32::from_be_bytes([a, b, c, d]) as usize;
        if length > self.max_message { Err(self.too_long(length)) } else { Ok(Some(length)) }
    }

    fn too_long(&self, length: usize) -> Status {
        Status::new(
            RESOURCE_EXHAUSTED,
            format!("a message has {length} bytes, the limit is {}", self.max_message),
        )
    }

    fn message(&mut self, compressed: bool, message: Bytes) -> Result<Bytes, Status> {
        match (compressed, self.encoding) {
            (false, _) => Ok(message),
            (true, Encoding::Gzip) => self.inflated(&message),
            (true, Encoding::Identity) => {
                Err(Status::new(INTERNAL, "a message is compressed, its stream says nothing"))
            }
            (true, Encoding::Unknown) => Err(Status::new(UNIMPLEMENTED, "gzip is the only compression here")),
        }
    }

    fn inflated(&mut self, message: &[u8]) -> Result<Bytes, Status> {
        if self.room == 0 {
            return Err(Status::new(RESOURCE_EXHAUSTED, FULL));
        }
        let mut inflated = Vec::new();
        let limit = self.max_message as u64 + 1;
        match GzDecoder::new(message).take(limit).read_to_end(&mut inflated) {
            Ok(length) if length > self.max_message => Err(self.too_long(length)),
            Ok(length) => {
                self.room = self.room.saturating_sub(length);
                Ok(inflated.into())
            }
            Err(error) => Err(Status::new(INTERNAL, format!("a message cannot be inflated: {error}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn all(deframer: &mut Deframer, bytes: &[u8]) -> Result<Vec<Bytes>, Status> {
        let mut messages = Vec::new();
        deframer.push(Bytes::copy_from_slice(bytes));
        while let Some(message) = deframer.next_message()? {
            messages.push(message);
        }
        Ok(messages)
    }

    #[test]
    fn messages_come_out_however_their_bytes_are_cut() {
        let frames = [framed(b"one"), framed(b""), framed(&[7; 300])].concat();
        for cut in 1..frames.len() {
            let mut deframer = Deframer::new(1000, Encoding::Identity);
            let mut messages = Vec::new();
            for chunk in frames.chunks(cut) {
                messages.extend(all(&mut deframer, chunk).unwrap());
            }
            assert_eq!(
                messages,
                [Bytes::from("one"), Bytes::new(), Bytes::from(vec![7; 300])],
                "cut at {cut}"
            );
            assert_eq!((deframer.held(), deframer.is_partial()), (0, false));
        }
    }

    #[test]
    fn a_message_over_the_limit_is_refused_by_its_length_alone() {
        let mut deframer = Deframer::new(4, Encoding::Identity);
        let refused = all(&mut deframer, &[0, 0, 0, 0, 5]).unwrap_err();
        assert_eq!(refused.code, RESOURCE_EXHAUSTED);
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        let mut deframer = Deframer::new(4, Encoding::Identity);
        assert_eq!(all(&mut deframer, b"GET / HTTP/1.1").unwrap_err().code, INTERNAL);
    }

    #[test]
    fn compressed_messages_are_refused_once_there_is_no_room_for_what_is_in_them() {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(&[5; 1000]).unwrap();
        let mut frame = framed(&encoder.finish().unwrap()).to_vec();
        frame[0] = 1;
        let mut deframer = Deframer::new(1000, Encoding::Gzip);
        deframer.room = 1500;
        deframer.push(frame.repeat(3).into());
        assert_eq!(deframer.next_message().unwrap().unwrap().len(), 1000);
        assert_eq!(deframer.next_message().unwrap().unwrap().len(), 1000);
        assert_eq!(deframer.next_message().unwrap_err().code, RESOURCE_EXHAUSTED);
    }

    #[test]
    fn gzip_is_inflated_up_to_the_limit() {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(&[5; 1000]).unwrap();
        let mut frame = framed(&encoder.finish().unwrap()).to_vec();
        frame[0] = 1;
        assert_eq!(
            all(&mut Deframer::new(1000, Encoding::Gzip), &frame).unwrap(),
            [Bytes::from(vec![5; 1000])]
        );
        assert_eq!(
            all(&mut Deframer::new(999, Encoding::Gzip), &frame).unwrap_err().code,
            RESOURCE_EXHAUSTED
        );
        assert_eq!(all(&mut Deframer::new(1000, Encoding::Unknown), &frame).unwrap_err().code, UNIMPLEMENTED);
        assert_eq!(all(&mut Deframer::new(1000, Encoding::Identity), &frame).unwrap_err().code, INTERNAL);
        *frame.last_mut().expect("not empty") ^= 0xff;
        assert_eq!(all(&mut Deframer::new(1000, Encoding::Gzip), &frame).unwrap_err().code, INTERNAL);
    }
}
