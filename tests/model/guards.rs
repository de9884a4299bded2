//! The guards of the protocol, each of which can be taken out: then the checker must find what it is there for.

/// What protects the ledger. All are there in Muster; a negative control takes one out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Guards {
    /// A write names the token of the block's claim.
    pub(super) token: bool,
    /// A write is applied only if all lines it says are done are still open: `done <@ lines`.
    pub(super) subset: bool,
    /// A lost reply is asked about by token and part, not by token alone.
    pub(super) part: bool,
    /// One part stands for one content for ever: a write that is sent again is the same write.
    pub(super) same_content: bool,
    /// A worker starts nothing after its lease has run out.
    pub(super) lease: bool,
    /// Redis alone does not make a worker dead: its row in PostgreSQL must be stale as well.
    pub(super) second_witness: bool,
    /// Recovery frees a block only while it has the token it was listed with.
    pub(super) recovery_token: bool,
    /// Reconcile leaves alone the tokens of claims that are under way.
    pub(super) doubtful: bool,
    /// A live worker frees what the database says it holds and it does not.
    pub(super) reconcile: bool,
    /// Blocks of workers that were declared dead are freed.
    pub(super) recovery: bool,
    /// A batch ends only when its outcomes and failures together are all its lines.
    pub(super) set_equation: bool,
    /// The update that ends a batch finds it not ended.
    pub(super) not_ended: bool,
    /// The update that ends a batch finds the generation and the number of rows that were audited.
    pub(super) same_rows: bool,
    /// The sweep looks at batches that no worker asked about.
    pub(super) sweep: bool,
    /// The sweep makes blocks of lines of which nothing is recorded.
    pub(super) heal: bool,
    /// A close asks for the look at its batch.
    pub(super) ask: bool,
}

impl Guards {
    pub(super) const ALL: Self = Self {
        token: true,
        subset: true,
        part: true,
        same_content: true,
        lease: true,
        second_witness: true,
        recovery_token: true,
        doubtful: true,
        reconcile: true,
        recovery: true,
        set_equation: true,
        not_ended: true,
        same_rows: true,
        sweep: true,
        heal: true,
        ask: true,
    };
}
