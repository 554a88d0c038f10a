//! Workers that answer at once and clients that ask at once, for `benchmarks/router.py`: what a router costs is not to
//! be hidden behind either. A thread a connection, the standard library alone.
//!
//! `serve MODEL_FOLDER PORT...` answers on each port as a worker would. `ask SECONDS REQUESTS CONNECTIONS PORT...` sends
//! the body that it reads from standard input over so many kept connections until the time is over or all requests were
//! sent; of several ports each request goes to all of them at once. It prints the seconds it took in nanoseconds, then
//! those of each request, one a line.

use std::{
    env,
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    os::fd::AsRawFd,
    process::exit,
    sync::{
        atomic::{AtomicI64, Ordering},
        Arc, Barrier,
    },
    thread,
    time::{Duration, Instant},
};

extern "C" {
    fn setsockopt(socket: i32, level: i32, name: i32, value: *const i32, length: u32) -> i32;
}

/// Have what came acknowledged at once. The router sends an answer in several small packets and leaves Nagle's algorithm
/// on, so each waits for the acknowledgement of the one before: 40 ms of the kernel's, which would hide the router's own.
fn acknowledge(stream: &TcpStream) {
    const IPPROTO_TCP: i32 = 6;
    const TCP_QUICKACK: i32 = 12;
    // SAFETY: the descriptor is open, and the value is read during the call only.
    unsafe { setsockopt(stream.as_raw_fd(), IPPROTO_TCP, TCP_QUICKACK, &1, 4) };
}

/// A connection, and what came over it that nobody has taken yet.
struct Wire {
    stream: TcpStream,
    held: Vec<u8>,
}

impl Wire {
    fn new(stream: TcpStream) -> io::Result<Wire> {
        stream.set_nodelay(true)?;
        Ok(Wire { stream, held: Vec::new() })
    }

    fn take(&mut self, count: usize) -> io::Result<Vec<u8>> {
        while self.held.len() < count {
            self.more()?;
        }
        let rest = self.held.split_off(count);
        Ok(std::mem::replace(&mut self.held, rest))
    }

    fn take_through(&mut self, mark: &[u8]) -> io::Result<Vec<u8>> {
        loop {
            if let Some(place) = place_of(&self.held, mark) {
                return self.take(place + mark.len());
            }
            self.more()?;
        }
    }

    fn more(&mut self) -> io::Result<()> {
        let mut part = [0; 16384];
        acknowledge(&self.stream);
        match self.stream.read(&mut part)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            count => {
                self.held.extend_from_slice(&part[..count]);
                Ok(())
            }
        }
    }

    /// The next message: its head in lower case, and its body.
    fn message(&mut self) -> io::Result<(String, Vec<u8>)> {
        let head = String::from_utf8_lossy(&self.take_through(b"\r\n\r\n")?).to_lowercase();
        let field = |name: &str| head.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        if field("transfer-encoding:") != Some("chunked") {
            let length = field("content-length:").map_or(Ok(0), str::parse).map_err(io::Error::other)?;
            let body = self.take(length)?;
            return Ok((head, body));
        }
        let mut body = Vec::new();
        loop {
            let line = self.take_through(b"\r\n")?;
            let size = usize::from_str_radix(String::from_utf8_lossy(&line).trim(), 16).map_err(io::Error::other)?;
            let chunk = self.take(size + 2)?;
            if size == 0 {
                return Ok((head, body));
            }
            body.extend_from_slice(&chunk[..size]);
        }
    }
}

fn place_of(text: &[u8], mark: &[u8]) -> Option<usize> {
    text.windows(mark.len()).position(|window| window == mark)
}

fn whole(body: &str) -> Vec<u8> {
    format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into()
}

/// Two events in two chunks, as an engine sends a token and then the end.
fn streamed() -> Vec<u8> {
    let mut text = String::from(
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n",
    );
    let token = r#"data: {"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant",
"content":"hi"},"finish_reason":"stop"}]}"#
        .replace('\n', "");
    for event in [token.as_str(), "data: [DONE]"] {
        text += &format!("{:x}\r\n{event}\n\n\r\n", event.len() + 2);
    }
    (text + "0\r\n\r\n").into()
}

fn serve(model: &str, ports: &[u16]) -> io::Result<()> {
    let about = whole(&format!(
        r#"{{"model_path":"{model}","served_model_name":"mock","tp_size":1,"dp_size":1,"is_generation":true,
"model_type":"mock","version":"mock","max_running_requests":4096}}"#
    ));
    let answer = whole(
        r#"{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},
"finish_reason":"stop"}],"usage":{"prompt_tokens":3}}"#,
    );
    let replies = Arc::new((about, answer, streamed()));
    let listeners = ports.iter().map(|port| TcpListener::bind(("127.0.0.1", *port))).collect::<io::Result<Vec<_>>>()?;
    let accepting: Vec<_> = listeners
        .into_iter()
        .map(|listener| {
            let replies = replies.clone();
            thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let replies = replies.clone();
                    thread::spawn(move || answer_all(stream, &replies));
                }
            })
        })
        .collect();
    accepting.into_iter().for_each(|one| one.join().expect("a listener's thread"));
    Ok(())
}

fn answer_all(stream: TcpStream, (about, answer, events): &(Vec<u8>, Vec<u8>, Vec<u8>)) -> io::Result<()> {
    let mut wire = Wire::new(stream)?;
    loop {
        let (head, body) = wire.message()?;
        wire.stream.write_all(match () {
            () if head.starts_with("get ") => about,
            () if place_of(&body, b"\"stream\":true").is_some() => events,
            () => answer,
        })?;
    }
}

/// What all clients share: where and what to ask, for how long, and how often together.
struct Work {
    ports: Vec<u16>,
    body: Vec<u8>,
    seconds: f64,
    left: AtomicI64,
    begin: Barrier,
}

/// The nanoseconds of each request that was begun within the limits; an answer that is not good is an error.
/// When it began to ask, and how long each request took, in nanoseconds.
fn client(Work { ports, body, seconds, left, begin }: &Work) -> io::Result<(Instant, Vec<u128>)> {
    let connect = |port: &u16| Wire::new(TcpStream::connect(("127.0.0.1", *port))?);
    let mut wires = ports.iter().map(connect).collect::<io::Result<Vec<_>>>()?;
    let mut request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    request.extend_from_slice(body);
    let mut times = Vec::new();
    begin.wait();
    let began = Instant::now();
    let until = began + Duration::from_secs_f64(*seconds);
    loop {
        let asked = Instant::now();
        if asked >= until || left.fetch_sub(1, Ordering::Relaxed) <= 0 {
            return Ok((began, times));
        }
        for wire in &mut wires {
            wire.stream.write_all(&request)?;
        }
        for wire in &mut wires {
            let (head, body) = wire.message()?;
            if !head.starts_with("http/1.1 200") || place_of(&body, b"\"hi\"").is_none() {
                return Err(io::Error::other(format!("{head}{}", String::from_utf8_lossy(&body))));
            }
        }
        times.push(asked.elapsed().as_nanos());
    }
}

fn ask(seconds: f64, requests: i64, connections: usize, ports: Vec<u16>) -> io::Result<()> {
    let mut body = Vec::new();
    io::stdin().read_to_end(&mut body)?;
    let (left, begin) = (AtomicI64::new(requests), Barrier::new(connections + 1));
    let shared = Arc::new(Work { ports, body, seconds, left, begin });
    let clients: Vec<_> = (0..connections)
        .map(|_| {
            let shared = shared.clone();
            thread::spawn(move || {
                client(&shared).unwrap_or_else(|error| {
                    eprintln!("{error}");
                    exit(1)
                })
            })
        })
        .collect();
    shared.begin.wait();
    let done: Vec<_> = clients.into_iter().map(|one| one.join().expect("a client's thread")).collect();
    // Since the first client began: this thread may have been woken later than they, and would tell less than they took.
    let lasted = done.iter().map(|(began, _)| began.elapsed()).max().unwrap_or_default().as_nanos();
    let times = done.iter().flat_map(|(_, times)| times);
    let lines: Vec<String> = [lasted].iter().chain(times).map(u128::to_string).collect();
    println!("{}", lines.join("\n"));
    Ok(())
}

fn main() -> io::Result<()> {
    let words: Vec<String> = env::args().skip(1).collect();
    let ports = |from: usize| words[from..].iter().map(|word| word.parse().expect("a port")).collect::<Vec<u16>>();
    match words[0].as_str() {
        "serve" => serve(&words[1], &ports(2)),
        "ask" => ask(
            words[1].parse().expect("seconds"),
            words[2].parse().expect("requests"),
            words[3].parse().expect("connections"),
            ports(4),
        ),
        word => Err(io::Error::other(format!("{word}: serve or ask"))),
    }
}
