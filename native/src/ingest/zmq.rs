//! The few functions of libzmq that reading takes, from the copy that this process has loaded already.
//!
//! The only unsafe code of the crate. What makes it sound: the addresses are those of libzmq's functions, a socket is
//! used by one thread at a time, and a message stays where it is while it is used.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::io::{Error, ErrorKind};
use std::mem::{MaybeUninit, transmute};

/// Frames of a published message: topic, seq, payload.
pub const FRAMES: usize = 3;
/// Frames of a malformed message whose lengths are told.
const SHOWN: usize = 8;
const DONT_WAIT: c_int = 1;
/// Of `zmq_socket_monitor`: a connection that can be used.
const HANDSHAKE_SUCCEEDED: u16 = 0x1000;

/// `zmq_msg_t`.
#[repr(C, align(8))]
struct Frame([MaybeUninit<u8>; 64]);

type OnFrame = unsafe extern "C" fn(*mut Frame) -> c_int;

/// Functions of libzmq.
#[derive(Clone, Copy)]
pub struct Api {
    init: OnFrame,
    close: OnFrame,
    more: OnFrame,
    size: unsafe extern "C" fn(*const Frame) -> usize,
    data: unsafe extern "C" fn(*mut Frame) -> *mut c_void,
    receive: unsafe extern "C" fn(*mut Frame, *mut c_void, c_int) -> c_int,
    errno: unsafe extern "C" fn() -> c_int,
}

impl Api {
    /// From the addresses of `zmq_msg_init`, `_close`, `_more`, `_size`, `_data`, `_recv` and `zmq_errno`.
    ///
    /// # Safety
    /// They are what they are said to be, for as long as the process runs.
    pub unsafe fn at(addresses: [usize; 7]) -> Self {
        let [init, close, more, size, data, receive, errno] =
            addresses.map(|address| address as *const c_void);
        // SAFETY: the caller's word; the signatures are those of zmq.h since libzmq 3.
        unsafe {
            Self {
                init: transmute::<*const c_void, OnFrame>(init),
                close: transmute::<*const c_void, OnFrame>(close),
                more: transmute::<*const c_void, OnFrame>(more),
                size: transmute::<*const c_void, unsafe extern "C" fn(*const Frame) -> usize>(size),
                data: transmute::<*const c_void, unsafe extern "C" fn(*mut Frame) -> *mut c_void>(data),
                receive: transmute::<
                    *const c_void,
                    unsafe extern "C" fn(*mut Frame, *mut c_void, c_int) -> c_int,
                >(receive),
                errno: transmute::<*const c_void, unsafe extern "C" fn() -> c_int>(errno),
            }
        }
    }
}

/// A socket of libzmq.
pub struct Socket(*mut c_void);

// SAFETY: libzmq lets a socket move between threads, with a memory barrier between the uses: whoever holds it holds
// it in a mutex.
unsafe impl Send for Socket {}

impl Socket {
    /// From the handle that libzmq gave.
    ///
    /// # Safety
    /// It is a socket that nobody else uses until this value is gone, and that is not closed before.
    pub unsafe fn at(handle: usize) -> Self {
        Self(handle as *mut c_void)
    }
}

/// What a socket monitor told since it was last asked.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Heard {
    /// The last event before any handshake.
    pub before: Option<u16>,
    pub handshake: bool,
    /// The last event after the last handshake.
    pub after: Option<u16>,
}

/// What a socket had.
#[derive(Debug, PartialEq, Eq)]
pub enum Received {
    /// A message of three frames, now in its place.
    Message,
    /// One of another number of frames; the lengths of the first ones.
    Malformed(Vec<usize>),
    Nothing,
}

/// Places for messages, numbered from 0; frames are read where libzmq put them.
pub struct Places {
    api: Api,
    frames: Box<[UnsafeCell<Frame>]>,
}

// SAFETY: a frame belongs to no thread, and there is no shared access across threads.
unsafe impl Send for Places {}

impl Places {
    pub fn new(api: Api, messages: usize) -> Self {
        // One place more, for frames that no message should have.
        let frames: Box<[_]> =
            (0..messages * FRAMES + 1).map(|_| UnsafeCell::new(Frame([MaybeUninit::uninit(); 64]))).collect();
        for frame in &frames {
            // SAFETY: 64 bytes that are ours, and from now on an empty message.
            unsafe { (api.init)(frame.get()) };
        }
        Self { api, frames }
    }

    /// Takes the next message off a socket, without waiting, into a place.
    pub fn receive(&mut self, socket: &Socket, place: usize) -> Received {
        let mut lengths: [usize; SHOWN] = [0; SHOWN];
        let mut count = 0;
        loop {
            let at = if count < FRAMES { place * FRAMES + count } else { self.frames.len() - 1 };
            let frame = self.frames[at].get();
            // SAFETY: an initialised message, whose former content libzmq frees; the socket is ours.
            if unsafe { (self.api.receive)(frame, socket.0, DONT_WAIT) } < 0 {
                // SAFETY: no arguments.
                match Error::from_raw_os_error(unsafe { (self.api.errno)() }).kind() {
                    ErrorKind::Interrupted => continue,
                    // Nothing there; or the context has ended, and nothing will come.
                    _ => return Received::Nothing,
                }
            }
            // SAFETY: a message that was received.
            let (length, more) = unsafe { ((self.api.size)(frame), (self.api.more)(frame) != 0) };
            if let Some(shown) = lengths.get_mut(count) {
                *shown = length;
            }
            count += 1;
            if !more {
                break;
            }
        }
        if count == FRAMES {
            Received::Message
        } else {
            Received::Malformed(lengths[..count.min(SHOWN)].to_vec())
        }
    }

    /// A frame of a received message.
    pub fn frame(&self, place: usize, number: usize) -> &[u8] {
        let frame = self.frames[place * FRAMES + number].get();
        // SAFETY: a message that was received; libzmq neither moves nor changes its content, and `receive` and
        // `release`, which free it, need this borrow to have ended. An empty slice must not be null.
        unsafe {
            match (self.api.size)(frame) {
                0 => &[],
                size => std::slice::from_raw_parts((self.api.data)(frame).cast(), size),
            }
        }
    }

    /// Frees the content of a place's payload, which may be large.
    pub fn release(&mut self, place: usize) {
        let frame = self.frames[place * FRAMES + FRAMES - 1].get();
        // SAFETY: an initialised message.
        unsafe {
            (self.api.close)(frame);
            (self.api.init)(frame);
        }
    }

    /// Reads a socket monitor empty. Uses the first place.
    pub fn hear(&mut self, monitor: &Socket) -> Heard {
        let mut heard = Heard::default();
        loop {
            // [event, u16; value, u32] [address]
            match self.receive(monitor, 0) {
                Received::Nothing => return heard,
                Received::Malformed(lengths) if lengths.len() == 2 => {
                    match self.frame(0, 0).first_chunk().map(|event| u16::from_ne_bytes(*event)) {
                        Some(HANDSHAKE_SUCCEEDED) => (heard.handshake, heard.after) = (true, None),
                        event if heard.handshake => heard.after = event,
                        event => heard.before = event,
                    }
                }
                _ => {}
            }
        }
    }
}

impl Drop for Places {
    fn drop(&mut self) {
        for frame in &self.frames {
            // SAFETY: an initialised message that is not used again.
            unsafe { (self.api.close)(frame.get()) };
        }
    }
}
