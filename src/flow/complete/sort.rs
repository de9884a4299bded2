//! Which of the scopes that were asked for are over: one cheap question for many.

use super::{CompleteError, Completer};
use crate::store::{
    batches::{self, Over},
    fault,
};

/// Of the scopes asked for: those that are over, those whose budget may be spent, and those of which the database says neither.
#[derive(Debug, Default)]
pub(super) struct Sorted {
    pub(super) over: Vec<Over>,
    pub(super) spent: Vec<i64>,
    pub(super) refused: Vec<i64>,
}

/// A group of which the database says nothing is taken apart: one scope of it may be the cause.
pub(super) async fn sort_apart(completer: &Completer, ids: Vec<i64>) -> Result<Sorted, CompleteError> {
    let client = completer.store.general.get().await?;
    let (mut sorted, mut groups) = (Sorted::default(), vec![ids]);
    while let Some(mut group) = groups.pop() {
        match batches::worth_a_look(&client, &group).await {
            Ok((over, spent)) => {
                sorted.over.extend(over);
                sorted.spent.extend(spent);
            }
            Err(source) => {
                let id = group.first().copied().unwrap_or_default();
                if source.code().is_none() || fault::is_of_connection(&source) {
                    return Err(CompleteError::Query { id, source });
                } else if group.len() > 1 {
                    let half = group.split_off(group.len() / 2);
                    groups.extend([half, group]);
                } else {
                    tracing::warn!(
                        scope = id,
                        error = fault::words(&source),
                        "whether a scope is over cannot be asked; it rests"
                    );
                    sorted.refused.push(id);
                }
            }
        }
    }
    Ok(sorted)
}
