//! Is a prefill worker's answer a good acknowledgement? Judged as its bytes come, in constant memory.
//!
//! The answer of the prefill leg is thrown away, but it is the only word on whether the KV was made: an engine that
//! fails after it has begun a stream reports the failure inside of an HTTP 200. A good answer has a JSON or event-stream
//! content type, is whole, is JSON or events of JSON, holds no error, does not say that it was aborted, and (on routes
//! that generate) holds an answer. A stream must also end with its closing marker, since a body that is delimited by the
//! end of the connection cannot be told from one that was cut.
//!
//! Standard library only, so that `rustc --test` runs the tests below without any crate.

use std::fmt;

/// Longest piece of text that is kept: a key, a finish reason, a message.
const KEPT: usize = 1024;
/// Deepest nesting that is followed.
const DEEPEST: usize = 256;

/// What is wrong with an acknowledgement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Neither JSON nor an event stream.
    ContentType(String),
    /// The body is no JSON, or an event is none.
    Malformed(&'static str),
    /// The body ends before it is complete.
    Cut(&'static str),
    /// The worker reports an error.
    Reported { message: String, code: Option<u32> },
    /// The worker has aborted the request.
    Aborted { message: String, code: Option<u32> },
    /// All is well but there is no answer in it.
    Unanswered,
}

impl Fault {
    /// The HTTP status for the client: a client's own error as the worker reported it, else a bad gateway.
    pub fn status(&self) -> u16 {
        match self {
            Fault::Reported { code: Some(code), .. } | Fault::Aborted { code: Some(code), .. }
                if (400..500).contains(code) =>
            {
                *code as u16
            }
            _ => 502,
        }
    }

    /// A short name for logs and clients.
    pub fn name(&self) -> &'static str {
        match self {
            Fault::ContentType(_) => "prefill_ack_content_type",
            Fault::Malformed(_) => "prefill_ack_malformed",
            Fault::Cut(_) => "prefill_ack_cut",
            Fault::Reported { .. } => "prefill_ack_error",
            Fault::Aborted { .. } => "prefill_ack_aborted",
            Fault::Unanswered => "prefill_ack_unanswered",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::ContentType(kind) => write!(out, "the prefill worker answered with content type {kind:?}"),
            Fault::Malformed(what) => write!(out, "the prefill worker's answer is malformed: {what}"),
            Fault::Cut(what) => write!(out, "the prefill worker's answer was cut: {what}"),
            Fault::Reported { message, .. } => write!(out, "the prefill worker reported an error: {message}"),
            Fault::Aborted { message, .. } => write!(out, "the prefill worker aborted the request: {message}"),
            Fault::Unanswered => write!(out, "the prefill worker's answer holds no answer"),
        }
    }
}

/// The keys that matter; all others are one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    Choices,
    Code,
    Error,
    FinishReason,
    Message,
    MetaInfo,
    Object,
    OutputIds,
    StatusCode,
    Text,
    Type,
    Other,
}

impl Key {
    fn of(name: &[u8]) -> Key {
        match name {
            b"choices" => Key::Choices,
            b"code" => Key::Code,
            b"error" => Key::Error,
            b"finish_reason" => Key::FinishReason,
            b"message" => Key::Message,
            b"meta_info" => Key::MetaInfo,
            b"object" => Key::Object,
            b"output_ids" => Key::OutputIds,
            b"status_code" => Key::StatusCode,
            b"text" => Key::Text,
            b"type" => Key::Type,
            _ => Key::Other,
        }
    }
}

/// An open container: the key in which an object stands (None for an array), and whether it holds anything.
#[derive(Clone, Copy, Debug)]
struct Frame {
    key: Option<Key>,
    filled: bool,
}

/// What a finished value was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Value {
    Null,
    Bool,
    Number(Option<u32>),
    Text,
    Object,
    Array { filled: bool },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    Minus,
    Zero,
    Whole,
    Dot,
    Fraction,
    E,
    Sign,
    Exponent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Value,
    ValueOrEnd,
    Key,
    KeyOrEnd,
    Colon,
    CommaOrEnd,
    End,
    Text,
    Escape,
    Hex { left: u8, value: u16 },
    Number(Number),
    Literal(&'static [u8], Value),
}

/// One JSON document, recognised as its bytes come.
#[derive(Debug)]
struct Json {
    state: State,
    stack: Vec<Frame>,
    /// The top value is an array: the answers to a batch.
    batch: bool,
    is_key: bool,
    /// The start of a text that does not come in one piece. What is cut is longer than every word looked for.
    kept: Vec<u8>,
    /// Bytes that the UTF-8 character being read still needs, and the range of the next one.
    utf8: (u8, u8, u8),
    number: Option<u32>,
    answered: bool,
    all_answered: bool,
    error: bool,
    abort: bool,
    message: String,
    code: Option<u32>,
}

/// Whether it is JSON so far, or what is malformed.
type Wellformed = Result<(), &'static str>;

const UNEXPECTED: &str = "a byte where JSON has none";

/// White space may stand between any two parts; every other byte is malformed as said.
fn blank(byte: u8, what: &'static str) -> Wellformed {
    match byte {
        b' ' | b'\t' | b'\n' | b'\r' => Ok(()),
        _ => Err(what),
    }
}

impl Json {
    fn new() -> Json {
        Json {
            state: State::Value,
            stack: Vec::new(),
            batch: false,
            is_key: false,
            kept: Vec::new(),
            utf8: (0, 0, 0),
            number: None,
            answered: false,
            all_answered: true,
            error: false,
            abort: false,
            message: String::new(),
            code: None,
        }
    }

    /// Be ready for the next document, with the memory of the last one.
    fn reset(&mut self) {
        let (mut stack, mut kept) = (std::mem::take(&mut self.stack), std::mem::take(&mut self.kept));
        stack.clear();
        kept.clear();
        *self = Json {
            stack,
            kept,
            ..Json::new()
        };
    }

    /// Take bytes in, those of one line alone or all of them; returns how many that were.
    fn take(&mut self, bytes: &[u8], line: bool) -> Result<usize, &'static str> {
        let mut rest = bytes;
        while let Some(&byte) = rest.first() {
            if line && ends_line(byte) {
                break;
            }
            rest = &rest[1..];
            self.push(byte, &mut rest)?;
        }
        Ok(bytes.len() - rest.len())
    }

    /// Take in one byte, and off `rest` the text that goes with it.
    fn push(&mut self, byte: u8, rest: &mut &[u8]) -> Wellformed {
        match self.state {
            State::Value | State::ValueOrEnd => match byte {
                b'{' => self.open(Some(Key::Other), State::KeyOrEnd),
                b'[' => self.open(None, State::ValueOrEnd),
                _ if self.stack.is_empty() => blank(byte, "it is no JSON object"),
                b'"' => self.open_text(false, rest),
                b'-' => self.open_number(Number::Minus, None),
                b'0' => self.open_number(Number::Zero, Some(0)),
                b'1'..=b'9' => self.open_number(Number::Whole, Some(u32::from(byte - b'0'))),
                b't' => self.open_literal(b"rue", Value::Bool),
                b'f' => self.open_literal(b"alse", Value::Bool),
                b'n' => self.open_literal(b"ull", Value::Null),
                b']' if matches!(self.state, State::ValueOrEnd) => self.close(),
                _ => blank(byte, UNEXPECTED),
            },
            State::Key | State::KeyOrEnd => match byte {
                b'"' => self.open_text(true, rest),
                b'}' if matches!(self.state, State::KeyOrEnd) => self.close(),
                _ => blank(byte, UNEXPECTED),
            },
            State::Colon => match byte {
                b':' => {
                    self.state = State::Value;
                    Ok(())
                }
                _ => blank(byte, UNEXPECTED),
            },
            State::CommaOrEnd => self.push_behind(byte),
            State::End => blank(byte, UNEXPECTED),
            State::Text => {
                self.push_text(byte)?;
                self.push_plain(rest);
                Ok(())
            }
            State::Escape => self.push_escape(byte),
            State::Hex { left, value } => self.push_hex(left, value, byte),
            State::Literal(wanted, value) => {
                if wanted[0] != byte {
                    return Err("a word that is no JSON");
                }
                self.state = State::Literal(&wanted[1..], value);
                match wanted.len() {
                    1 => self.finish_value(value, &[]),
                    _ => Ok(()),
                }
            }
            State::Number(number) => match self.push_number(number, byte)? {
                true => Ok(()),
                false => self.push_behind(byte),
            },
        }
    }

    /// Take in a byte behind a value that stands in a container.
    fn push_behind(&mut self, byte: u8) -> Wellformed {
        match (byte, self.in_object()) {
            (b',', inside) => {
                self.state = if inside { State::Key } else { State::Value };
                Ok(())
            }
            (b'}', true) | (b']', false) => self.close(),
            _ => blank(byte, UNEXPECTED),
        }
    }

    /// Within a text, take its plain start off `rest`, all at once.
    fn push_plain(&mut self, rest: &mut &[u8]) {
        if !matches!(self.state, State::Text) || self.utf8.0 > 0 {
            return;
        }
        let (text, left) = rest.split_at(plain(rest));
        let kept = text.len().min(KEPT - self.kept.len());
        self.kept.extend_from_slice(&text[..kept]);
        *rest = left;
    }

    /// The document is over: every container closed, nothing half read.
    fn complete(&self) -> bool {
        self.state == State::End
    }

    fn untouched(&self) -> bool {
        self.state == State::Value && self.stack.is_empty()
    }

    fn in_object(&self) -> bool {
        self.stack.last().is_some_and(|frame| frame.key.is_some())
    }

    fn open(&mut self, key: Option<Key>, state: State) -> Wellformed {
        match self.stack.len() {
            0 => self.batch = key.is_none(),
            DEEPEST => return Err("it is nested too deep"),
            _ => {}
        }
        self.stack.push(Frame { key, filled: false });
        self.state = state;
        Ok(())
    }

    fn close(&mut self) -> Wellformed {
        match self.stack.pop() {
            Some(Frame { key: Some(_), .. }) => self.finish_value(Value::Object, &[]),
            Some(Frame { key: None, filled }) => self.finish_value(Value::Array { filled }, &[]),
            None => Err("a container ends that was not begun"),
        }
    }

    /// A text begins with `rest`. One that is plain and whole is taken off it and not copied.
    fn open_text(&mut self, is_key: bool, rest: &mut &[u8]) -> Wellformed {
        self.is_key = is_key;
        let (text, left) = rest.split_at(plain(rest));
        if let [b'"', left @ ..] = left {
            *rest = left;
            return self.finish_text(&text[..text.len().min(KEPT)]);
        }
        self.kept.clear();
        self.state = State::Text;
        self.push_plain(rest);
        Ok(())
    }

    fn open_number(&mut self, number: Number, value: Option<u32>) -> Wellformed {
        (self.number, self.state) = (value, State::Number(number));
        Ok(())
    }

    fn open_literal(&mut self, rest: &'static [u8], value: Value) -> Wellformed {
        self.state = State::Literal(rest, value);
        Ok(())
    }

    fn keep(&mut self, byte: u8) {
        if self.kept.len() < KEPT {
            self.kept.push(byte);
        }
    }

    fn push_text(&mut self, byte: u8) -> Wellformed {
        let (left, low, high) = self.utf8;
        if left > 0 {
            if byte < low || byte > high {
                return Err("text that is not UTF-8");
            }
            self.utf8 = (left - 1, 0x80, 0xbf);
            self.keep(byte);
            return Ok(());
        }
        match byte {
            b'"' => {
                let text = std::mem::take(&mut self.kept);
                self.finish_text(&text)?;
                self.kept = text;
            }
            b'\\' => self.state = State::Escape,
            0..=0x1f => return Err("a control character in a text"),
            0x20..=0x7f => self.keep(byte),
            _ => {
                // The second byte's range keeps out over-long forms, surrogates and what lies beyond Unicode.
                self.utf8 = match byte {
                    0xc2..=0xdf => (1, 0x80, 0xbf),
                    0xe0 => (2, 0xa0, 0xbf),
                    0xed => (2, 0x80, 0x9f),
                    0xe1..=0xef => (2, 0x80, 0xbf),
                    0xf0 => (3, 0x90, 0xbf),
                    0xf1..=0xf3 => (3, 0x80, 0xbf),
                    0xf4 => (3, 0x80, 0x8f),
                    _ => return Err("text that is not UTF-8"),
                };
                self.keep(byte);
            }
        }
        Ok(())
    }

    fn push_escape(&mut self, byte: u8) -> Wellformed {
        self.state = State::Text;
        match byte {
            b'"' | b'\\' | b'/' => self.keep(byte),
            b'b' => self.keep(8),
            b'f' => self.keep(12),
            b'n' => self.keep(b'\n'),
            b'r' => self.keep(b'\r'),
            b't' => self.keep(b'\t'),
            b'u' => self.state = State::Hex { left: 4, value: 0 },
            _ => return Err("an escape that JSON does not have"),
        }
        Ok(())
    }

    fn push_hex(&mut self, left: u8, value: u16, byte: u8) -> Wellformed {
        let digit = char::from(byte)
            .to_digit(16)
            .ok_or("an escape that JSON does not have")?;
        let value = value << 4 | digit as u16;
        if left > 1 {
            self.state = State::Hex { left: left - 1, value };
            return Ok(());
        }
        // Half of a surrogate pair is no character; none of the words looked for holds one.
        let character = char::from_u32(u32::from(value)).unwrap_or(char::REPLACEMENT_CHARACTER);
        for &byte in character.encode_utf8(&mut [0; 4]).as_bytes() {
            self.keep(byte);
        }
        self.state = State::Text;
        Ok(())
    }

    /// Returns whether the byte belongs to the number; if not the number is over and the byte is still to be read.
    fn push_number(&mut self, number: Number, byte: u8) -> Result<bool, &'static str> {
        let next = match (number, byte) {
            (Number::Minus, b'0') => Number::Zero,
            (Number::Minus, b'1'..=b'9') => Number::Whole,
            (Number::Whole, b'0'..=b'9') => {
                let digit = u32::from(byte - b'0');
                self.number = self.number.and_then(|value| value.checked_mul(10)?.checked_add(digit));
                Number::Whole
            }
            (Number::Zero | Number::Whole, b'.') => Number::Dot,
            (Number::Dot | Number::Fraction, b'0'..=b'9') => Number::Fraction,
            (Number::Zero | Number::Whole | Number::Fraction, b'e' | b'E') => Number::E,
            (Number::E, b'+' | b'-') => Number::Sign,
            (Number::E | Number::Sign | Number::Exponent, b'0'..=b'9') => Number::Exponent,
            (Number::Zero | Number::Whole, _) => {
                self.finish_value(Value::Number(self.number), &[])?;
                return Ok(false);
            }
            (Number::Fraction | Number::Exponent, _) => {
                self.finish_value(Value::Number(None), &[])?;
                return Ok(false);
            }
            _ => return Err("a number that is none"),
        };
        self.state = State::Number(next);
        Ok(true)
    }

    fn finish_text(&mut self, text: &[u8]) -> Wellformed {
        if !self.is_key {
            return self.finish_value(Value::Text, text);
        }
        if let Some(frame) = self.stack.last_mut() {
            frame.key = Some(Key::of(text));
        }
        self.state = State::Colon;
        Ok(())
    }

    /// A value is over, a text with its start; `stack` holds what it stands in.
    fn finish_value(&mut self, value: Value, text: &[u8]) -> Wellformed {
        self.state = if self.stack.is_empty() {
            State::End
        } else {
            State::CommaOrEnd
        };
        if let Some(frame) = self.stack.last_mut() {
            frame.filled = true;
        }
        if self.batch && self.stack.is_empty() {
            self.all_answered &= value == Value::Array { filled: true };
            return Ok(());
        }
        let place = &self.stack[usize::from(self.batch)..];
        if place.is_empty() && value != Value::Object {
            return Err("an answer of the batch is no JSON object");
        }
        // Nothing is noted deeper down, of a key that is none of those known, or of an item of an array.
        let known = place
            .last()
            .is_none_or(|frame| !matches!(frame.key, None | Some(Key::Other)));
        if place.len() > 3 || !known {
            return Ok(());
        }
        let mut keys = [None; 3];
        for (key, frame) in keys.iter_mut().zip(place) {
            *key = frame.key;
        }
        self.note(&keys[..place.len()], value, text);
        Ok(())
    }

    /// Note a value that stands at `keys` of an answer (None: in an array).
    fn note(&mut self, keys: &[Option<Key>], value: Value, text: &[u8]) {
        use Key::{Choices, Code, Error, FinishReason, Message, MetaInfo, Object, OutputIds, StatusCode, Text, Type};
        match (keys, value) {
            ([], _) => {
                self.all_answered &= self.answered;
                self.answered = false;
            }
            ([Some(Error)], Value::Null) => {}
            ([Some(Error)], _) => {
                self.error = true;
                if value == Value::Text {
                    self.keep_message(text);
                }
            }
            ([Some(Object)], Value::Text) => self.error |= text == b"error",
            ([Some(Choices | OutputIds)], Value::Array { filled }) => self.answered |= filled,
            ([Some(Text)], Value::Text) | ([Some(MetaInfo)], Value::Object) => self.answered = true,
            ([Some(Choices), None, Some(FinishReason)], Value::Text)
            | ([Some(MetaInfo), Some(FinishReason)], Value::Text)
            | ([Some(MetaInfo), Some(FinishReason), Some(Type)], Value::Text) => self.abort |= text == b"abort",
            ([Some(Message)], Value::Text)
            | ([Some(Error), Some(Message)], Value::Text)
            | ([Some(MetaInfo), Some(FinishReason), Some(Message)], Value::Text) => self.keep_message(text),
            ([Some(Code)], Value::Number(code))
            | ([Some(Error), Some(Code)], Value::Number(code))
            | ([Some(MetaInfo), Some(FinishReason), Some(StatusCode)], Value::Number(code)) => {
                self.code = code.or(self.code);
            }
            _ => {}
        }
    }

    fn keep_message(&mut self, text: &[u8]) {
        self.message = String::from_utf8_lossy(text).into_owned();
    }

    /// Judge a complete document.
    fn verdict(&mut self) -> Result<(), Fault> {
        let (message, code) = (std::mem::take(&mut self.message), self.code);
        if self.error {
            return Err(Fault::Reported { message, code });
        }
        if self.abort {
            return Err(Fault::Aborted { message, code });
        }
        Ok(())
    }
}

/// Where an event stream is within a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line {
    /// The name of a field, as far as it has come.
    Name,
    /// After `data:`; one blank is not data.
    Blank,
    Data,
    /// A comment or another field.
    Skip,
}

/// Events of JSON up to the closing marker.
#[derive(Debug)]
struct Events {
    line: Line,
    name: Vec<u8>,
    after_cr: bool,
    /// The bytes of the stream so far, up to the three of a byte order mark.
    start: u8,
    json: Json,
    /// What was wrong with the event's data, unless it turns out to be the closing marker.
    fault: Option<Fault>,
    /// The event's data is the start of the closing marker so far; the number of its bytes, and of its lines.
    marker: bool,
    bytes: usize,
    lines: usize,
    done: bool,
    items: usize,
    answered: bool,
}

const DATA: &[u8] = b"data:";
const DONE: &[u8] = b"[DONE]";
const MARK: &[u8; 3] = b"\xef\xbb\xbf";

/// How many bytes of plain text, ASCII that stands for itself in a JSON text, `bytes` begins with.
fn plain(bytes: &[u8]) -> usize {
    const ONES: u64 = u64::MAX / 255;
    const HIGH: u64 = 0x80 * ONES;
    // The high bit of a byte tells whether it is less. It says nothing of bytes behind the first that is, which do not
    // matter, nor of one that is not ASCII, which is special anyway.
    let less = |word: u64, than: u8| word.wrapping_sub(ONES * u64::from(than)) & HIGH;
    let mut at = 0;
    while let Some(eight) = bytes[at..].first_chunk() {
        let word = u64::from_le_bytes(*eight);
        let [quote, slash] = [b'"', b'\\'].map(|byte| less(word ^ (ONES * u64::from(byte)), 1));
        let special = word & HIGH | less(word, 0x20) | quote | slash;
        if special != 0 {
            return at + special.trailing_zeros() as usize / 8;
        }
        at += 8;
    }
    let special = |byte: &u8| !matches!(byte, 0x20..=0x7f) || matches!(byte, b'"' | b'\\');
    at + bytes[at..].iter().position(special).unwrap_or(bytes.len() - at)
}

fn ends_line(byte: u8) -> bool {
    byte == b'\n' || byte == b'\r'
}

/// How many bytes come before the end of the line, or before that of the piece.
fn before_end(bytes: &[u8]) -> usize {
    bytes.iter().position(|&byte| ends_line(byte)).unwrap_or(bytes.len())
}

impl Events {
    fn new() -> Events {
        Events {
            line: Line::Name,
            name: Vec::new(),
            after_cr: false,
            start: 0,
            json: Json::new(),
            fault: None,
            marker: true,
            bytes: 0,
            lines: 0,
            done: false,
            items: 0,
            answered: false,
        }
    }

    /// Take a piece in, what a line holds all at once.
    fn feed(&mut self, mut piece: &[u8]) -> Result<(), Fault> {
        while let [byte, rest @ ..] = piece {
            let whole = match self.line {
                Line::Name if self.name.is_empty() && piece.starts_with(DATA) => {
                    // Neither a byte order mark nor the second half of a line's end begins like this.
                    (self.start, self.after_cr, self.line) = (MARK.len() as u8, false, Line::Blank);
                    self.begin_data();
                    DATA.len()
                }
                Line::Data => self.take_data(piece),
                Line::Skip => before_end(piece),
                _ => 0,
            };
            if whole > 0 {
                piece = &piece[whole..];
                continue;
            }
            self.push(*byte)?;
            piece = rest;
        }
        Ok(())
    }

    fn push(&mut self, byte: u8) -> Result<(), Fault> {
        if usize::from(self.start) < MARK.len() {
            if byte == MARK[usize::from(self.start)] {
                self.start += 1;
                return Ok(());
            }
            self.start = MARK.len() as u8;
        }
        if std::mem::take(&mut self.after_cr) && byte == b'\n' {
            return Ok(());
        }
        if ends_line(byte) {
            self.after_cr = byte == b'\r';
            return self.end_line();
        }
        match self.line {
            Line::Name if byte == b':' => {
                self.line = if self.name == b"data" { Line::Blank } else { Line::Skip };
                if self.line == Line::Blank {
                    self.begin_data();
                }
            }
            Line::Name if self.name.len() < DATA.len() - 1 => self.name.push(byte),
            Line::Name => self.line = Line::Skip,
            Line::Blank => {
                self.line = Line::Data;
                if byte != b' ' {
                    self.take_data(&[byte]);
                }
            }
            // What such a line holds is taken in by `feed`.
            Line::Data | Line::Skip => {}
        }
        Ok(())
    }

    fn begin_data(&mut self) {
        if self.lines > 0 {
            self.note_data(b"\n");
            self.judge_data(b"\n", false);
        }
        self.lines += 1;
    }

    /// Take in data up to the end of its line; returns how many bytes that were.
    fn take_data(&mut self, bytes: &[u8]) -> usize {
        let count = self.judge_data(bytes, true).unwrap_or_else(|| before_end(bytes));
        self.note_data(&bytes[..count]);
        count
    }

    /// Have the data's JSON take bytes in. None: there is a fault, which is kept, and they are judged no more.
    fn judge_data(&mut self, bytes: &[u8], line: bool) -> Option<usize> {
        if self.fault.is_none() {
            match self.json.take(bytes, line) {
                Ok(count) => return Some(count),
                Err(what) => self.fault = Some(Fault::Malformed(what)),
            }
        }
        None
    }

    /// Keep of the data what tells the closing marker.
    fn note_data(&mut self, bytes: &[u8]) {
        let all = self.bytes + bytes.len();
        self.marker = self.marker && DONE.get(self.bytes..all) == Some(bytes);
        self.bytes = all;
    }

    fn end_line(&mut self) -> Result<(), Fault> {
        match self.line {
            Line::Name if self.name.is_empty() => return self.end_event(),
            // A field without a colon has an empty value.
            Line::Name if self.name == b"data" => self.begin_data(),
            _ => {}
        }
        self.name.clear();
        self.line = Line::Name;
        Ok(())
    }

    fn end_event(&mut self) -> Result<(), Fault> {
        if self.lines == 0 {
            return Ok(());
        }
        let marker = std::mem::replace(&mut self.marker, true) && self.bytes == DONE.len();
        let fault = self.fault.take();
        (self.bytes, self.lines) = (0, 0);
        if self.done {
            return Err(Fault::Malformed("an event after the closing marker"));
        }
        if marker {
            self.done = true;
            return Ok(());
        }
        match fault {
            Some(fault) => return Err(fault),
            None if !self.json.complete() => return Err(Fault::Malformed("an event that is no whole JSON")),
            None => self.json.verdict()?,
        }
        self.items += 1;
        self.answered |= self.json.all_answered;
        self.json.reset();
        Ok(())
    }

    fn finish(mut self, generates: bool) -> Result<(), Fault> {
        // The last event counts even if the blank line behind it is missing: its marker says that it is the last.
        self.end_line()?;
        self.end_event()?;
        if !self.done {
            return Err(Fault::Cut("the stream has no closing marker"));
        }
        match generates && !self.answered || self.items == 0 {
            true => Err(Fault::Unanswered),
            false => Ok(()),
        }
    }
}

#[derive(Debug)]
enum Body {
    Json(Json),
    Events(Events),
}

/// Judges one answer as its bytes come, in pieces of any size.
#[derive(Debug)]
pub struct Scanner {
    body: Body,
    generates: bool,
}

/// The routes whose answers must hold generated text.
pub const GENERATE: [&str; 3] = ["/generate", "/v1/chat/completions", "/v1/completions"];

impl Scanner {
    /// Begin an answer of `route` with its content type.
    ///
    /// # Errors
    /// The content type is neither JSON nor an event stream.
    pub fn new(content_type: Option<&str>, route: &str) -> Result<Scanner, Fault> {
        let whole = content_type.unwrap_or("");
        let kind = whole.split(';').next().unwrap_or("").trim();
        let body = if kind.eq_ignore_ascii_case("text/event-stream") {
            Body::Events(Events::new())
        } else if kind.eq_ignore_ascii_case("application/json") {
            Body::Json(Json::new())
        } else {
            return Err(Fault::ContentType(whole.chars().take(100).collect()));
        };
        Ok(Scanner {
            body,
            generates: GENERATE.contains(&route),
        })
    }

    /// Take a piece of the body in.
    ///
    /// # Errors
    /// The answer is no good, whatever may follow. The scanner is of no more use then.
    pub fn feed(&mut self, piece: &[u8]) -> Result<(), Fault> {
        match &mut self.body {
            Body::Json(json) => json.take(piece, false).map(|_| ()).map_err(Fault::Malformed),
            Body::Events(events) => events.feed(piece),
        }
    }

    /// The body is over: give the verdict.
    ///
    /// # Errors
    /// What is wrong with the answer.
    pub fn finish(self) -> Result<(), Fault> {
        match self.body {
            Body::Events(events) => events.finish(self.generates),
            Body::Json(json) if json.untouched() => Err(Fault::Cut("the body is empty")),
            Body::Json(json) if !json.complete() => Err(Fault::Cut("the JSON has no end")),
            Body::Json(mut json) => {
                json.verdict()?;
                match self.generates && !json.all_answered {
                    true => Err(Fault::Unanswered),
                    false => Ok(()),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHAT: &str = "/v1/chat/completions";
    const SSE: &str = "text/event-stream";
    const JSON: &str = "application/json";

    fn judge_pieces(kind: &str, route: &str, pieces: &[&[u8]]) -> Result<(), Fault> {
        let mut scanner = Scanner::new(Some(kind), route)?;
        for piece in pieces {
            scanner.feed(piece)?;
        }
        scanner.finish()
    }

    fn judge(kind: &str, body: impl AsRef<[u8]>) -> Result<(), Fault> {
        judge_pieces(kind, CHAT, &[body.as_ref()])
    }

    fn name(kind: &str, body: impl AsRef<[u8]>) -> &'static str {
        judge(kind, body).map_or_else(|fault| fault.name(), |()| "good")
    }

    const ITEM: &str = r#"data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"length"}]}"#;
    const END: &str = "data: [DONE]\n\n";

    #[test]
    fn every_route_that_generates_must_answer_and_no_other() {
        for route in ["/generate", CHAT, "/v1/completions"] {
            assert_eq!(judge_pieces(JSON, route, &[b"{}"]), Err(Fault::Unanswered), "{route}");
        }
        for route in ["/v1/rerank", "/generate/", "generate", ""] {
            assert_eq!(judge_pieces(JSON, route, &[b"{}"]), Ok(()), "{route}");
        }
    }

    #[test]
    fn a_content_type_is_read_without_its_case_and_parameters_and_told_up_to_a_length() {
        for kind in ["Text/Event-Stream", "TEXT/EVENT-STREAM; charset=utf-8", " text/event-stream ;x"] {
            assert_eq!(judge(kind, format!("{ITEM}\n\n{END}")), Ok(()), "{kind}");
        }
        for kind in ["Application/JSON", "application/json;charset=utf-8"] {
            assert_eq!(judge(kind, r#"{"text":"a"}"#), Ok(()), "{kind}");
        }
        for kind in ["text/event-streams", "application/jsonl", "", ";application/json"] {
            assert_eq!(judge(kind, "{}"), Err(Fault::ContentType(kind.to_string())), "{kind}");
        }
        let told = Fault::ContentType("\u{e9}".repeat(100));
        assert_eq!(judge(&"\u{e9}".repeat(101), "{}"), Err(told));
    }

    #[test]
    fn the_one_word_for_an_abort_is_its_own() {
        for (word, said) in [("abort", "prefill_ack_aborted"), ("aborted", "good"), ("abor", "good"), ("Abort", "good")] {
            let body = format!(r#"{{"text":"a","meta_info":{{"finish_reason":{{"type":"{word}"}}}}}}"#);
            assert_eq!(name(JSON, body), said, "{word}");
        }
    }

    #[test]
    fn a_message_is_kept_up_to_a_length_however_it_comes() {
        for (length, kept) in [(KEPT - 1, KEPT - 1), (KEPT, KEPT), (KEPT + 1, KEPT), (5 * KEPT, KEPT)] {
            let told = Err(Fault::Reported {
                message: "a".repeat(kept),
                code: None,
            });
            for text in ["a".repeat(length), "\\u0061".repeat(length)] {
                let body = format!(r#"{{"error":"{text}"}}"#);
                for size in [1, 7, KEPT, body.len()] {
                    let pieces: Vec<&[u8]> = body.as_bytes().chunks(size).collect();
                    assert_eq!(judge_pieces(JSON, CHAT, &pieces), told, "{length} in pieces of {size}");
                }
            }
        }
    }

    #[test]
    fn nesting_is_followed_to_a_depth_and_no_deeper() {
        let nested = |depth: usize| {
            let inside = depth - 1;
            format!(r#"{{"text":"a","x":{}{}}}"#, "[".repeat(inside), "]".repeat(inside))
        };
        assert_eq!(judge(JSON, nested(DEEPEST)), Ok(()));
        assert_eq!(judge(JSON, nested(DEEPEST + 1)), Err(Fault::Malformed("it is nested too deep")));
    }

    #[test]
    fn good_answers_of_every_route_are_good() {
        for body in [
            r#"{"id":"x","choices":[{"message":{"content":"a"},"finish_reason":"length"}],"usage":null,"error":null}"#,
            r#"{"choices":[{"text":"a","finish_reason":null}]}"#,
            r#"{"text":"","meta_info":{"finish_reason":{"type":"length","length":1}}}"#,
            r#"{"output_ids":[7]}"#,
            r#"{"output_ids":[],"meta_info":{}}"#,
            r#" [ {"text":"a"} , {"text":"b"} ] "#,
            "\t{\"meta_info\":{\"input_token_logprobs\":[[-0.5e-3,1,null],[-1E+2,2,\"\\u00e9\u{20ac}\u{1f600}\"]]}}\r\n",
        ] {
            assert_eq!(judge(JSON, body), Ok(()), "{body}");
        }
    }

    #[test]
    fn good_streams_are_good() {
        for body in [
            format!("{ITEM}\n\n{END}"),
            format!("{ITEM}\r\n\r\ndata: [DONE]\r\n\r\n"),
            format!("{ITEM}\r\rdata:[DONE]\r\r"),
            format!(": hello\n\nevent: x\nid: 1\nretry: 5\n{ITEM}\n\n: bye\n\n{END}"),
            format!("\u{feff}{ITEM}\n\n{END}"),
            format!("{ITEM}\n\ndata: {{\"choices\":[],\n\ndata: x").replace(",\n\ndata: x", &format!("}}\n\n{END}")),
            format!("data: {{\"choices\":\ndata: [{{}}]}}\n\n{END}"),
            format!("data: {{\"choices\":\r\ndata: [{{}}]}}\r\n\r\n{END}"),
            format!("{ITEM}\n\ndata: [DONE]\n"),
            format!("{ITEM}\n\ndata: [DONE]"),
            format!("{ITEM}\n\n{END}: afterwards\n\n\n"),
            format!("data: {{\"choices\":[]}}\n\n{ITEM}\n\n{END}"),
            format!("data:\ndata:{{\"text\":\"a\"}}\n\n{END}"),
        ] {
            assert_eq!(judge(SSE, &body), Ok(()), "{body:?}");
        }
    }

    #[test]
    fn a_content_type_may_have_parameters_and_any_case() {
        for kind in [
            "application/json; charset=utf-8",
            "Application/JSON",
            " application/json ;x=y",
        ] {
            assert_eq!(judge(kind, r#"{"text":"a"}"#), Ok(()), "{kind}");
        }
    }

    #[test]
    fn any_other_content_type_is_a_fault_of_its_own() {
        for kind in [
            "text/html",
            "application/jsonl",
            "text/plain; application/json",
            "",
            "json",
        ] {
            assert_eq!(name(kind, r#"{"text":"a"}"#), "prefill_ack_content_type", "{kind}");
        }
        assert!(Scanner::new(None, CHAT).is_err());
    }

    #[test]
    fn an_error_at_the_top_is_reported_with_its_message_and_code() {
        let cases = [
            (r#"{"error":{"message":"boom","code":500}}"#, "boom", Some(500), 502),
            (
                r#"{"error":{"code":413,"type":"x","message":"too long"}}"#,
                "too long",
                Some(413),
                413,
            ),
            (r#"{"choices":[{}],"error":"boom"}"#, "boom", None, 502),
            (
                r#"{"object":"error","message":"bad","code":400}"#,
                "bad",
                Some(400),
                400,
            ),
            (
                r#"{"\u0065rror":{"message":"a\"\\\n\u00e9b"}}"#,
                "a\"\\\n\u{e9}b",
                None,
                502,
            ),
            (r#"[{"text":"a"},{"error":{"message":"second"}}]"#, "second", None, 502),
            (r#"{"error":{},"text":"a"}"#, "", None, 502),
            (r#"{"error":{"code":99999999999}}"#, "", None, 502),
            (r#"{"error":{"code":200,"message":"m"}}"#, "m", Some(200), 502),
            (r#"{"error":{"code":600,"message":"m"}}"#, "m", Some(600), 502),
            (r#"{"error":{"code":-400,"message":"m"}}"#, "m", None, 502),
            (r#"{"error":{"code":413,"message":"m"},"code":-1}"#, "m", Some(413), 413),
        ];
        for (body, message, code, status) in cases {
            let fault = judge(JSON, body).unwrap_err();
            assert_eq!(
                fault,
                Fault::Reported {
                    message: message.to_string(),
                    code
                },
                "{body}"
            );
            assert_eq!(fault.status(), status, "{body}");
        }
    }

    #[test]
    fn an_error_deeper_down_or_null_is_none() {
        for body in [
            r#"{"text":"error","error":null}"#,
            r#"{"choices":[{"error":{"message":"m"}}]}"#,
            r#"{"meta_info":{"error":"x"},"object":"chat.completion"}"#,
            r#"{"text":"a","errors":1,"error ":2}"#,
        ] {
            assert_eq!(judge(JSON, body), Ok(()), "{body}");
        }
    }

    #[test]
    fn an_error_anywhere_in_a_stream_is_reported() {
        let error = r#"data: {"error":{"message":"KVTransferError","code":500}}"#;
        for body in [
            format!("{error}\n\n{END}"),
            format!("{ITEM}\n\n{error}\n\n{END}"),
            format!("{ITEM}\n\n{error}\n\n"),
            format!("{ITEM}\r\n\r\n{error}"),
        ] {
            let fault = judge(SSE, &body).unwrap_err();
            assert_eq!(
                fault,
                Fault::Reported {
                    message: "KVTransferError".to_string(),
                    code: Some(500)
                },
                "{body:?}"
            );
        }
    }

    #[test]
    fn an_abort_is_a_fault_in_each_shape_of_a_finish_reason() {
        for body in [
            r#"{"choices":[{"finish_reason":"length"},{"finish_reason":"abort"}]}"#,
            r#"{"text":"a","meta_info":{"finish_reason":{"type":"abort","message":"gone","status_code":503}}}"#,
            r#"{"text":"a","meta_info":{"finish_reason":"abort"}}"#,
            r#"[{"text":"a","meta_info":{"finish_reason":{"type":"abort"}}}]"#,
        ] {
            assert_eq!(name(JSON, body), "prefill_ack_aborted", "{body}");
        }
        let told = judge(
            JSON,
            r#"{"text":"a","meta_info":{"finish_reason":{"message":"m","status_code":400,"type":"abort"}}}"#,
        );
        assert_eq!(
            told,
            Err(Fault::Aborted {
                message: "m".to_string(),
                code: Some(400)
            })
        );
        assert_eq!(
            judge(
                JSON,
                r#"{"text":"abort","meta_info":{"finish_reason":{"type":"stop","matched":"abort"}}}"#
            ),
            Ok(())
        );
    }

    #[test]
    fn a_body_that_ends_too_soon_is_cut() {
        let whole = r#"{"id":"x","choices":[{"text":"a\n","n":-1.5e3,"b":true}]}"#;
        for end in 0..whole.len() {
            assert_eq!(name(JSON, &whole[..end]), "prefill_ack_cut", "{}", &whole[..end]);
        }
    }

    #[test]
    fn a_stream_without_its_closing_marker_is_no_good_wherever_it_ends() {
        let whole = format!("{ITEM}\n\n{ITEM}\n\ndata: [DONE");
        for end in 0..=whole.len() {
            assert_ne!(name(SSE, &whole[..end]), "good", "{:?}", &whole[..end]);
        }
        assert_eq!(name(SSE, format!("{ITEM}\n\n")), "prefill_ack_cut");
        assert_eq!(name(SSE, ""), "prefill_ack_cut");
    }

    #[test]
    fn a_marker_alone_or_one_that_is_not_the_last_is_no_good() {
        assert_eq!(name(SSE, END), "prefill_ack_unanswered");
        assert_eq!(name(SSE, format!("{ITEM}\n\n{END}{ITEM}\n\n")), "prefill_ack_malformed");
        assert_eq!(name(SSE, format!("{ITEM}\n\n{END}{END}")), "prefill_ack_malformed");
        for marker in ["[DONE]]", " [DONE]", "[DONE", "[done]", "[DONE]x", "[DO\ndata: NE]"] {
            assert_ne!(name(SSE, format!("{ITEM}\n\ndata: {marker}\n\n")), "good", "{marker}");
        }
    }

    #[test]
    fn an_event_that_holds_half_a_json_is_malformed_even_if_it_says_enough() {
        for half in [
            "{\"choices\":[{}]",
            "{\"text\":\"a\",\"x\":1",
            "{\"text\":\"a\"",
            "[{\"text\":\"a\"}",
        ] {
            assert_eq!(
                name(SSE, format!("{ITEM}\n\ndata: {half}\n\n{END}")),
                "prefill_ack_malformed",
                "{half}"
            );
        }
    }

    #[test]
    fn what_is_no_json_is_malformed() {
        for body in [
            "x",
            "{]",
            "{\"a\"}",
            "{\"a\":}",
            "{\"a\":1,}",
            "[1]",
            "[[]]",
            "[{},]",
            "{,}",
            "{\"a\" 1}",
            "{a:1}",
            "true ",
            "\"text\"",
            "1 ",
            "{\"a\":01}",
            "{\"a\":-01}",
            "{\"a\":+1}",
            "{\"a\":.5}",
            "{\"a\":1.}",
            "{\"a\":1e}",
            "{\"a\":--1}",
            "{\"a\":tru}",
            "{\"a\":nul1}",
            "{\"a\":\"\\x\"}",
            "{\"a\":\"\\u12g4\"}",
            "{\"a\":\"\n\"}",
            "{} {}",
            "{}x",
            "[{}]]",
            "{\"a\":[}",
            "{\"a\":[1}]",
            "<html>",
            "{'a':1}",
            "\u{feff}{}",
            "{\"a\":NaN}",
            "data: {}\n\n",
        ] {
            assert_eq!(name(JSON, body), "prefill_ack_malformed", "{body:?}");
            let event = body.replace('\n', " ");
            if body != "{\"a\":\"\n\"}" {
                assert_eq!(
                    name(SSE, format!("data: {event}\n\n{END}")),
                    "prefill_ack_malformed",
                    "{body:?}"
                );
            }
        }
    }

    #[test]
    fn a_field_without_a_colon_is_an_empty_one_and_a_longer_name_is_another() {
        assert_eq!(name(SSE, format!("{ITEM}\n\ndata\n\n{END}")), "prefill_ack_malformed");
        for other in ["dat", "datax", "datadata", "data "] {
            for end in ["", ":", ": x"] {
                let body = format!("{ITEM}\n\n{other}{end}\n\n{END}");
                let bytes: Vec<&[u8]> = body.as_bytes().chunks(1).collect();
                assert_eq!(judge_pieces(SSE, CHAT, &bytes), Ok(()), "{body}");
            }
        }
    }

    #[test]
    fn a_byte_order_mark_stands_at_the_start_of_a_stream_alone() {
        for body in [
            format!("data:\u{feff}{{\"text\":\"a\"}}\n\n{END}"),
            format!("{ITEM}\n\ndata:\u{feff}{{\"text\":\"a\"}}\n\n{END}"),
        ] {
            assert_eq!(name(SSE, &body), "prefill_ack_malformed", "{body:?}");
        }
    }

    #[test]
    fn plain_text_ends_where_it_would_end_byte_by_byte() {
        for length in 0..40 {
            let text = vec![b'a'; length];
            assert_eq!(plain(&text), length);
            for (at, special) in (0..length).flat_map(|at| (0..=255).map(move |byte| (at, byte))) {
                let mut text = text.clone();
                text[at] = special;
                let stands_for_itself = (0x20..0x80).contains(&special) && special != b'"' && special != b'\\';
                assert_eq!(
                    plain(&text),
                    if stands_for_itself { length } else { at },
                    "{special} at {at}"
                );
            }
        }
    }

    #[test]
    fn text_that_is_not_utf8_is_malformed() {
        for bad in [
            &[0xffu8][..],
            &[0xc0, 0x80],
            &[0xc1, 0xbf],
            &[0x80],
            &[0xe0, 0x9f, 0xbf],
            &[0xed, 0xa0, 0x80],
            &[0xf0, 0x8f, 0x80, 0x80],
            &[0xf4, 0x90, 0x80, 0x80],
            &[0xf5, 0x80, 0x80, 0x80],
            &[0xc3, b'"'],
            &[0xe2, 0x82, b'a'],
        ] {
            let body = [b"{\"text\":\"".as_slice(), bad, b"\"}"].concat();
            assert!(std::str::from_utf8(&body).is_err());
            assert_eq!(name(JSON, &body), "prefill_ack_malformed", "{bad:x?}");
        }
    }

    #[test]
    fn an_answer_without_an_answer_is_a_fault_only_where_text_is_generated() {
        for body in [
            "{}",
            r#"{"choices":[]}"#,
            r#"{"text":null}"#,
            r#"{"id":"x","usage":{}}"#,
            "[]",
            r#"[{"text":"a"},{}]"#,
        ] {
            assert_eq!(name(JSON, body), "prefill_ack_unanswered", "{body}");
            assert_eq!(judge_pieces(JSON, "/v1/rerank", &[body.as_bytes()]), Ok(()), "{body}");
        }
        let usage = format!("data: {{\"choices\":[],\"usage\":{{}}}}\n\n{END}");
        assert_eq!(name(SSE, &usage), "prefill_ack_unanswered");
        assert_eq!(judge_pieces(SSE, "/v1/rerank", &[usage.as_bytes()]), Ok(()));
        let nothing = judge_pieces(SSE, "/v1/rerank", &[END.as_bytes()]);
        assert_eq!(nothing, Err(Fault::Unanswered));
    }

    #[test]
    fn nesting_is_followed_to_a_limit_and_refused_beyond() {
        let deep = |levels: usize| format!("{{\"text\":\"a\",\"x\":{}{}}}", "[".repeat(levels), "]".repeat(levels));
        assert_eq!(judge(JSON, deep(DEEPEST - 1)), Ok(()));
        assert_eq!(name(JSON, deep(DEEPEST)), "prefill_ack_malformed");
        assert_eq!(name(JSON, "[".repeat(1 << 20)), "prefill_ack_malformed");
    }

    #[test]
    fn memory_does_not_grow_with_the_answer() {
        let huge = "y".repeat(1 << 20);
        let mut scanner = Scanner::new(Some(SSE), CHAT).unwrap();
        for part in [
            ": ",
            &huge,
            "\nevent: ",
            &huge,
            "\n",
            &huge,
            "\ndata: {\"",
            &huge,
            "\":\"",
            &huge,
            "\",\"text\":\"",
            &huge,
        ] {
            scanner.feed(part.as_bytes()).unwrap();
            let Body::Events(events) = &scanner.body else {
                panic!("an event stream is no JSON body")
            };
            assert!(events.json.kept.capacity() <= 2 * KEPT && events.name.capacity() <= 64);
        }
        scanner.feed(format!("\"}}\n\n{END}").as_bytes()).unwrap();
        assert_eq!(scanner.finish(), Ok(()));
    }

    #[test]
    fn a_message_is_kept_to_a_limit_and_a_longer_key_is_no_known_one() {
        let Err(Fault::Reported { message, .. }) =
            judge(JSON, format!("{{\"error\":\"{}\"}}", "\u{20ac}".repeat(KEPT)))
        else {
            panic!("an error is not reported")
        };
        assert!(message.len() <= KEPT + 3);
        let long = format!("{{\"error\":\"{}\"}}", "m".repeat(2 * KEPT));
        for pieces in [vec![long.as_bytes()], long.as_bytes().chunks(100).collect()] {
            let message = "m".repeat(KEPT);
            assert_eq!(
                judge_pieces(JSON, CHAT, &pieces),
                Err(Fault::Reported { message, code: None })
            );
        }
        let padded = format!("{{\"text\":\"a\",\"error{}\":1}}", "r".repeat(2 * KEPT));
        assert_eq!(judge(JSON, padded), Ok(()));
    }

    /// A small generator with a fixed seed: the same tests every time.
    struct Dice(u64);

    impl Dice {
        fn roll(&mut self, sides: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 % sides as u64) as usize
        }
    }

    fn bodies() -> Vec<(&'static str, Vec<u8>)> {
        let mut all = Vec::new();
        for body in [
            format!("\u{feff}: c\r\n{ITEM}\r\n\r\ndata: {{\"text\":\"\u{1f600}\\u20ac\"}}\r\r{END}"),
            format!("{ITEM}\n\ndata: {{\"error\":{{\"message\":\"\u{e9}\",\"code\":429}}}}\n\n{END}"),
            format!("{ITEM}\n\ndata: {{\"choices\":[{{\"finish_reason\":\"abort\"}}]}}\n\n{END}"),
            format!("{ITEM}\n\ndata: [DONE]\r\n"),
        ] {
            all.push((SSE, body.into_bytes()));
        }
        for body in [
            r#"{"id":"x","choices":[{"message":{"content":"a\u00e9"},"finish_reason":"length"}],"error":null,"n":-1.5e+3}"#,
            r#"[{"text":"é€😀"},{"meta_info":{"finish_reason":{"type":"abort","status_code":400,"message":"m"}}}]"#,
            r#"{"error":{"message":"boom","code":500}}"#,
        ] {
            all.push((JSON, body.as_bytes().to_vec()));
        }
        all
    }

    #[test]
    fn every_cut_in_two_gives_the_verdict_of_the_whole() {
        for (kind, body) in bodies() {
            let whole = judge(kind, &body);
            for cut in 0..=body.len() {
                assert_eq!(
                    judge_pieces(kind, CHAT, &[&body[..cut], &body[cut..]]),
                    whole,
                    "{kind} cut at {cut}"
                );
            }
            let bytes: Vec<&[u8]> = body.chunks(1).collect();
            assert_eq!(judge_pieces(kind, CHAT, &bytes), whole);
        }
    }

    #[test]
    fn a_text_that_goes_on_in_the_next_line_is_no_json_however_the_body_is_cut() {
        let body = b"data: {\"a\": \"xxxxxxxx\ndata: y\"}\n\ndata: [DONE]\n\n";
        let fault = Err(Fault::Malformed("a control character in a text"));
        for size in [1, 2, 7, body.len()] {
            assert_eq!(judge_pieces(SSE, CHAT, &body.chunks(size).collect::<Vec<_>>()), fault);
        }
    }

    #[test]
    fn broken_bodies_never_panic_and_never_depend_on_the_cuts() {
        let mut dice = Dice(0x5eed);
        let marks = b"{}[]\",:\\\r\n \xff\x80\xe2dataDONEnull0-.eE";
        for round in 0..6000 {
            let (kind, mut body) = bodies().swap_remove(round % bodies().len());
            for _ in 0..=dice.roll(4) {
                if body.is_empty() {
                    break;
                }
                let at = dice.roll(body.len());
                match dice.roll(4) {
                    0 => body[at] = marks[dice.roll(marks.len())],
                    1 => drop(body.remove(at)),
                    2 => body.insert(at, marks[dice.roll(marks.len())]),
                    _ => body.truncate(at + 1),
                }
            }
            let whole = judge(kind, &body);
            let mut pieces = Vec::new();
            let mut rest = body.as_slice();
            while !rest.is_empty() {
                let (piece, after) = rest.split_at(1 + dice.roll(rest.len()));
                pieces.push(piece);
                rest = after;
            }
            assert_eq!(
                judge_pieces(kind, CHAT, &pieces),
                whole,
                "{:?}",
                String::from_utf8_lossy(&body)
            );
        }
    }

    #[test]
    fn each_fault_has_a_name_and_words_of_its_own() {
        let faults = [
            Fault::ContentType("text/html".to_string()),
            Fault::Malformed("m"),
            Fault::Cut("c"),
            Fault::Reported {
                message: "r".to_string(),
                code: None,
            },
            Fault::Aborted {
                message: "a".to_string(),
                code: None,
            },
            Fault::Unanswered,
        ];
        let names: std::collections::HashSet<_> = faults.iter().map(Fault::name).collect();
        let words: std::collections::HashSet<_> = faults.iter().map(Fault::to_string).collect();
        assert_eq!((names.len(), words.len()), (faults.len(), faults.len()));
        assert!(faults.iter().all(|fault| fault.status() == 502));
    }
}
