//! Reads `kind cuts body` lines (the places of the cuts with commas, the body in hexadecimal) and prints the scanner's
//! verdict on each.

#[path = "pd_ack.rs"]
mod pd_ack;

use std::io::{stdin, BufRead};

fn verdict(kind: &str, cuts: &[usize], body: &[u8]) -> Result<(), pd_ack::Fault> {
    let mut scanner = pd_ack::Scanner::new(Some(kind), "/v1/chat/completions")?;
    let mut begin = 0;
    for end in cuts.iter().copied().chain([body.len()]) {
        scanner.feed(&body[begin..end])?;
        begin = end;
    }
    scanner.finish()
}

fn main() {
    for line in stdin().lock().lines() {
        let line = line.expect("a line");
        let parts: Vec<&str> = line.split(' ').collect();
        let body: Vec<u8> = (0..parts[2].len() / 2)
            .map(|at| u8::from_str_radix(&parts[2][2 * at..2 * at + 2], 16).expect("hexadecimal"))
            .collect();
        let kind = if parts[0] == "sse" { "text/event-stream" } else { "application/json" };
        let cuts: Vec<usize> = parts[1].split(',').filter(|cut| !cut.is_empty()).map(|cut| cut.parse().expect("a cut")).collect();
        match verdict(kind, &cuts, &body) {
            Ok(()) => println!("good"),
            Err(fault) => println!("{} {}", fault.name(), fault.status()),
        }
    }
}
