//! Chance that can be had again: the same seed, the same throws.

#[derive(Clone, Debug)]
pub(super) struct Dice(u64);

impl Dice {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// A number below `end`.
    pub(super) fn below(&mut self, end: usize) -> usize {
        // Xorshift: short, and good enough to choose a step.
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % end.max(1)
    }

    /// True in `percent` of all cases.
    pub(super) fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    /// Some of `things`, each with a chance of `percent`.
    pub(super) fn some<T>(&mut self, things: impl IntoIterator<Item = T>, percent: usize) -> Vec<T> {
        things.into_iter().filter(|_| self.chance(percent)).collect()
    }
}
