//! What a call costs at least on this machine: a process that reads a number of bytes, writes a number of bytes, and does nothing else.
//!
//! Prints its port and ends with its input. A connection begins with two numbers of four bytes, little-endian: the
//! bytes of a call and those of its answer.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

const BUFFER: usize = 1 << 16;

fn main() -> io::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    println!("{}", listener.local_addr()?.port());
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || answer(stream));
        }
    });
    io::copy(&mut io::stdin(), &mut io::sink())?;
    Ok(())
}

/// Answers the calls of a connection until it ends.
fn answer(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let (call, answer) = (number(&mut stream)?.max(1), number(&mut stream)?);
    let mut buffer = vec![0; BUFFER];
    let (mut answers, mut read) = (Vec::new(), 0);
    loop {
        let came = stream.read(&mut buffer)?;
        if came == 0 {
            return Ok(());
        }
        read += came;
        // Whatever came together is answered together.
        let bytes = read / call * answer;
        read %= call;
        answers.resize(answers.len().max(bytes), 0);
        stream.write_all(&answers[..bytes])?;
    }
}

fn number(stream: &mut TcpStream) -> io::Result<usize> {
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes) as usize)
}
