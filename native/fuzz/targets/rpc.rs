//! What a peer sends, as it comes from a socket: HTTP/2 frames to a server and to a client, and gRPC's frames within.
//! Nothing may panic, and what is held stays within its limits.

#![no_main]

use std::io::Write;
use std::net::{TcpListener, TcpStream};

use kvscout_native::rpc::{Deframer, Encoding, Event, Kind, Limits, Rpc, Status};
use kvscout_native_fuzz::bounded;
use libfuzzer_sys::fuzz_target;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const SETTINGS: &[u8] = b"\0\0\0\x04\0\0\0\0\0";
const MAX_MESSAGE: usize = 1 << 16;
const TURNS: usize = 1_000;

fuzz_target!(|input: &[u8]| {
    let Some((&choice, bytes)) = input.split_first() else { return };
    match choice % 3 {
        0 => deframe(bytes),
        1 => serve(bytes),
        _ => call(bytes),
    }
});

/// Messages are the same however their bytes are cut.
fn deframe(bytes: &[u8]) {
    let Some((&cut, bytes)) = bytes.split_first() else { return };
    let encoding = if cut & 1 == 0 { Encoding::Identity } else { Encoding::Gzip };
    let read = |size: usize| {
        let (mut deframer, mut messages) = (Deframer::new(MAX_MESSAGE, encoding), Vec::new());
        let failed = bytes
            .chunks(size)
            .try_for_each(|piece| {
                deframer.push(piece.to_vec().into());
                while let Some(message) = deframer.next_message()? {
                    messages.push(message);
                }
                Ok::<_, Status>(())
            })
            .is_err();
        (messages, failed)
    };
    let at_once = |bytes: &[u8]| read(bytes.len().max(1));
    // What inflates needs room of its own, and a message may grow up to its limit.
    let whole = if encoding == Encoding::Identity { bounded(bytes, at_once) } else { at_once(bytes) };
    assert_eq!(whole, read(usize::from(cut / 2) + 1));
}

fn limits() -> Limits {
    Limits { max_message: MAX_MESSAGE, max_streams: 8, ..Limits::default() }
}

fn serve(bytes: &[u8]) {
    let mut rpc = Rpc::new(limits()).expect("an epoll");
    let methods = [("/s/Unary", false, false), ("/s/Both", true, true)]
        .map(|(name, request_streaming, response_streaming)| {
            (name.to_owned(), Kind { request_streaming, response_streaming })
        })
        .to_vec();
    let (_, port) = rpc.listen(([127, 0, 0, 1], 0).into(), methods, None).expect("a port");
    let mut peer = TcpStream::connect(("127.0.0.1", port)).expect("it listens");
    // The server may have closed it already.
    let _ = peer.write_all(&[PREFACE, SETTINGS, bytes].concat());
    drop(peer);
    drive(&mut rpc, |rpc, event| {
        if let Event::Open { call, message, .. } = event {
            rpc.send(*call, message.as_deref().unwrap_or_default());
        }
    });
}

fn call(bytes: &[u8]) {
    let mut rpc = Rpc::new(limits()).expect("an epoll");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    let connection = rpc.connect(address, "test".to_owned(), None).expect("it connects");
    let call = rpc.call(connection, "/s/Unary", &Vec::new(), None).expect("a method").expect("a connection");
    rpc.send(call, b"request");
    let (mut peer, _) = listener.accept().expect("it connects");
    let _ = peer.write_all(&[SETTINGS, bytes].concat());
    drop(peer);
    drive(&mut rpc, |_, _| ());
}

/// Until its one connection is over.
fn drive(rpc: &mut Rpc, mut hear: impl FnMut(&mut Rpc, &Event)) {
    let mut seen = false;
    for _ in 0..TURNS {
        for event in rpc.poll().expect("the kernel polls") {
            hear(rpc, &event);
        }
        rpc.flush();
        let stats = rpc.stats();
        assert!(stats.calls <= 9 && stats.queued_bytes <= 16 * MAX_MESSAGE + (4 << 20), "{stats:?}");
        seen = seen || stats.connections > 0;
        if seen && stats.connections == 0 {
            return;
        }
        std::thread::yield_now();
    }
}
