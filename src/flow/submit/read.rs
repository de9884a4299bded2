//! The thread that reads: rows are checked and gathered into messages, which the side of the connection sends.

use super::{Given, Meter, SubmitError, Whole, exported};
use crate::flow::input::Reader;
use std::io::Read;
use tokio::sync::mpsc;

/// Rows, gathered into messages for the database.
pub(in crate::flow) trait Gather: Send + 'static {
    type Message: Send + 'static;

    /// Where the next row's text is to be appended; then [`Self::end_row`] counts it.
    fn next_row(&mut self) -> &mut Vec<u8>;

    /// Counts the row that was appended. A message that is full is returned, to be sent.
    fn end_row(&mut self) -> Option<Self::Message>;

    /// The last message, and the hash of all rows where they are hashed.
    fn finish(self) -> (Self::Message, Option<[u8; 32]>);
}

/// Messages that wait to be sent. With one being filled and one being sent they bound the memory of a submission.
const WAITING: usize = 4;

/// Reads in a thread of its own, which is work for a core: the messages it makes, and what it found at the end.
pub(in crate::flow) fn read_beside<G: Gather>(
    given: Given<impl Read + Send + 'static>,
    gather: G,
    meter: Meter,
) -> (mpsc::Receiver<G::Message>, impl Future<Output = Result<Whole, SubmitError>>) {
    let (sender, messages) = mpsc::channel(WAITING);
    let reading = tokio::task::spawn_blocking(move || read_all(given, gather, &sender, &meter));
    (messages, async { reading.await.map_err(|_| SubmitError::ReaderDied)? })
}

fn read_all<R: Read, G: Gather>(
    given: Given<R>,
    mut gather: G,
    messages: &mpsc::Sender<G::Message>,
    meter: &Meter,
) -> Result<Whole, SubmitError> {
    let Given { source, format, limits, exported } = given;
    let mut reader = Reader::new(source, format, limits);
    let mut row = Vec::new();
    let mut rows: u64 = 0;
    loop {
        let found = match exported {
            true => reader.next_row(&mut row)?,
            false => reader.append_row(gather.next_row())?,
        };
        if found.is_none() {
            break;
        }
        rows += 1;
        if rows > i32::MAX as u64 {
            return Err(SubmitError::TooMany);
        }
        if exported {
            exported::append_input(&row, format, limits, gather.next_row())
                .map_err(|problem| SubmitError::NotExported { row: rows, problem })?;
        }
        if let Some(message) = gather.end_row() {
            meter.set(rows, reader.bytes_read());
            if messages.blocking_send(message).is_err() {
                // The other side has an error of its own to report.
                return Err(SubmitError::ReaderDied);
            }
        }
    }
    meter.set(rows, reader.bytes_read());
    let (message, hash) = gather.finish();
    // Refused only when the other side has ended with its own error.
    let _ = messages.blocking_send(message);
    Ok(Whole { rows, hash })
}
