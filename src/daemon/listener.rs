//! The ear of the daemon: news from the database to whom they concern, over a connection that is made again for ever.

use crate::{
    backoff,
    error_text::describe,
    flow::{complete::Checks, rivals::Rival},
    health::Health,
    held::Held,
    liveness::{identity::Identity, session::Session},
    store::{
        connect::Target,
        listen::{self, Line, News},
    },
};
use std::{collections::HashMap, sync::Arc};
use tokio_util::sync::CancellationToken;

/// The name under which the readiness knows us.
const PART: &str = "listener";

#[derive(Clone, Debug)]
pub(super) struct Listener {
    pub(super) target: Target,
    pub(super) identity: Identity,
    pub(super) session: Session,
    pub(super) wakes: Arc<HashMap<String, Rival>>,
    pub(super) held: Held,
    pub(super) checks: Checks,
    pub(super) health: Health,
}

impl Listener {
    /// Listens until `stop`. Without a connection the dispatchers find their work by asking.
    pub(super) async fn run(self, stop: CancellationToken) {
        let mut failures = 0;
        loop {
            let held = self.held.clone();
            let mut heard = false;
            let tell = |news| {
                heard = true;
                self.tell(news);
            };
            let ended = listen::listen(&self.target, &stop, self.line(), move || held.ids(), tell).await;
            if self.session.is_wanted() {
                self.session.fell();
            }
            let Err(error) = ended else { return };
            failures = if heard { 1 } else { failures + 1 };
            self.health.unready(PART, "no connection to the database to listen on");
            if failures == 1 {
                tracing::warn!(error = describe(&error), "the listening connection is gone; making another");
            }
            let wait = backoff::of_database(failures);
            if stop.run_until_cancelled(tokio::time::sleep(wait)).await.is_none() {
                return;
            }
        }
    }

    fn line(&self) -> Line {
        match self.session.is_wanted() {
            true => Line::Session(self.identity.watch()),
            false => Line::Pooled,
        }
    }

    fn tell(&self, news: News) {
        match news {
            News::Work(queue) => {
                self.wakes.get(&queue).into_iter().for_each(Rival::news);
            }
            News::Abort(id) => {
                self.held.abort(id);
                self.checks.ask(id);
            }
            News::Check(id) => self.checks.ask(id),
            News::Doubt(doubted) => self.session.doubt(doubted),
            News::AnythingMissed => {
                if self.session.is_wanted() {
                    self.session.stands();
                }
                self.health.ready(PART);
                self.wakes.values().for_each(Rival::news);
            }
        }
    }
}
