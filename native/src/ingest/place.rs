//! Where an engine's socket is: an address that we connect to, or that engines connect to.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net as unix;
use std::path::Path;
use std::time::Duration;

use mio::event::Source;
use mio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use socket2::{SockRef, TcpKeepalive};

use crate::rpc::socket::Stream;

/// An address of ZMQ's, without a name to be looked up.
#[derive(Debug, Clone)]
pub enum Place {
    Tcp(SocketAddr),
    Ipc(unix::SocketAddr),
}

impl Place {
    /// `None`: it has a name of a host or of an interface, another transport, or no sense.
    pub fn parse(endpoint: &str) -> Option<Self> {
        if let Some(path) = endpoint.strip_prefix("ipc://") {
            let address = match path.strip_prefix('@') {
                Some(name) => unix::SocketAddr::from_abstract_name(name),
                None => unix::SocketAddr::from_pathname(path),
            };
            return (!path.is_empty()).then_some(Self::Ipc(address.ok()?));
        }
        let address = endpoint.strip_prefix("tcp://")?;
        if let Some(port) = address.strip_prefix("*:") {
            return Some(Self::Tcp((Ipv4Addr::UNSPECIFIED, port.parse().ok()?).into()));
        }
        Some(Self::Tcp(address.parse().ok()?))
    }

    /// Begins to connect.
    pub fn connect(&self) -> io::Result<Stream> {
        Ok(match self {
            Self::Tcp(address) => Stream::Tcp(TcpStream::connect(*address)?),
            Self::Ipc(address) => Stream::Unix(UnixStream::connect_addr(address)?),
        })
    }

    pub fn bind(&self) -> io::Result<Listener> {
        match self {
            Self::Tcp(address) => Ok(Listener::Tcp(TcpListener::bind(*address)?)),
            Self::Ipc(address) => {
                let path = address.as_pathname();
                // What a process left behind that is gone; ZMQ takes it away as well.
                if let Some(path) = path
                    && is_socket(path)
                {
                    std::fs::remove_file(path)?;
                }
                Ok(Listener::Ipc(UnixListener::bind_addr(address)?, address.clone()))
            }
        }
    }
}

/// Silence after which TCP asks whether a peer is there, how often, and how many times without an answer: one that
/// vanished is noticed within 30 s, whatever it speaks.
const IDLE: Duration = Duration::from_secs(10);
const PROBE_EVERY: Duration = Duration::from_secs(5);
const PROBES: u32 = 4;

/// Has the kernel end a connection whose peer is gone without a word.
pub fn keep_alive(stream: &Stream) -> io::Result<()> {
    match stream {
        Stream::Tcp(stream) => SockRef::from(stream).set_tcp_keepalive(
            &TcpKeepalive::new().with_time(IDLE).with_interval(PROBE_EVERY).with_retries(PROBES),
        ),
        Stream::Unix(_) => Ok(()),
    }
}

fn is_socket(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|found| found.file_type().is_socket())
}

/// A socket that engines connect to.
#[derive(Debug)]
pub enum Listener {
    Tcp(TcpListener),
    Ipc(UnixListener, unix::SocketAddr),
}

impl Listener {
    pub fn source(&mut self) -> &mut dyn Source {
        match self {
            Self::Tcp(listener) => listener,
            Self::Ipc(listener, _) => listener,
        }
    }

    pub fn accept(&self) -> io::Result<Stream> {
        Ok(match self {
            Self::Tcp(listener) => Stream::Tcp(listener.accept()?.0),
            Self::Ipc(listener, _) => Stream::Unix(listener.accept()?.0),
        })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Ipc(_, address) = self
            && let Some(path) = address.as_pathname()
        {
            // Whoever took it away meanwhile has done what is wanted.
            let _ = std::fs::remove_file(path);
        }
    }
}
