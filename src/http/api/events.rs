//! Progress as it happens: server-sent events, one whenever something has changed, until the batch has ended.

use super::{
    Api,
    batches::find,
    fields::{Place, Query},
    guard::Client,
    problem::Problem,
    slots::Slot,
};
use crate::store::batches::{self, Progress};
use axum::{
    extract::State,
    response::sse::{Event, KeepAlive, Sse},
};
use futures::{Stream, StreamExt, stream};
use std::{convert::Infallible, time::Duration};

/// How often it is asked; the answer costs the same for ten rows and ten million.
const ASK_EVERY: Duration = Duration::from_millis(500);
/// A comment that keeps proxies from hanging up, and tells us that the client has.
const SIGN_OF_LIFE: Duration = Duration::from_secs(15);

pub(super) async fn events(
    State(api): State<Api>,
    caller: Client,
    place: Place,
    query: Query,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, Problem> {
    query.done()?;
    let id = place.id()?;
    let slot = api.follower_slot(&caller)?;
    let first = find(&api, id).await?;
    // A follower that comes back gets the present state first, so the end of a stream loses nothing.
    let (stop, longest) = (api.stop.clone(), api.config.download_timeout);
    let over = async move { tokio::time::timeout(longest, stop.cancelled_owned()).await };
    let follower = Follower { api, id, last: None, next: Some(first), ended: false, _slot: slot };
    let events = stream::unfold(follower, Follower::step).take_until(Box::pin(over));
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(SIGN_OF_LIFE)))
}

/// A client that follows a batch.
struct Follower {
    api: Api,
    id: i64,
    /// What was sent last.
    last: Option<String>,
    next: Option<Progress>,
    ended: bool,
    _slot: Slot,
}

impl Follower {
    /// Waits for news. None when the end has been sent, or when the batch is there no more.
    async fn step(mut self) -> Option<(Result<Event, Infallible>, Self)> {
        if self.ended {
            return None;
        }
        loop {
            if let Some(progress) = self.next.take() {
                let text = serde_json::to_string(&progress).ok()?;
                if self.last.as_deref() != Some(&text) {
                    self.ended = progress.is_over();
                    let kind = if self.ended { "end" } else { "progress" };
                    let event = Event::default().event(kind).data(&text);
                    self.last = Some(text);
                    return Some((Ok(event), self));
                }
            }
            tokio::time::sleep(ASK_EVERY).await;
            self.next = self.ask().await?;
        }
    }

    /// What there is now: nothing when the database is away for a while, `None` when there is no such batch any more.
    async fn ask(&self) -> Option<Option<Progress>> {
        let Ok(client) = self.api.client().await else { return Some(None) };
        match batches::progress(&**client, self.id).await {
            Ok(None) => None,
            Ok(found) => Some(found),
            Err(_) => Some(None),
        }
    }
}
