//! A page has a limit in bytes beside its limit in rows: a thousand rows of a megabyte are not gathered in memory.

use futures::{TryStreamExt, pin_mut};
use tokio_postgres::{Error, Row, RowStream};

/// What fits.
#[derive(Debug)]
pub struct Page<T> {
    pub items: Vec<T>,
    /// There was more than fits; the next page begins after the last item.
    pub is_cut: bool,
}

/// Takes rows until they weigh `most` bytes together; the first is taken whatever it weighs.
pub(super) async fn gather<T>(
    rows: RowStream,
    most: usize,
    read: impl Fn(&Row) -> T,
    weight: impl Fn(&T) -> usize,
) -> Result<Page<T>, Error> {
    pin_mut!(rows);
    let (mut items, mut bytes, mut is_cut) = (Vec::new(), 0_usize, false);
    // Read to the end all the same: what is not read now would be read by the driver anyway.
    while let Some(row) = rows.try_next().await? {
        if is_cut {
            continue;
        }
        let item = read(&row);
        bytes = bytes.saturating_add(weight(&item));
        is_cut = bytes > most && !items.is_empty();
        if !is_cut {
            items.push(item);
        }
    }
    Ok(Page { items, is_cut })
}
