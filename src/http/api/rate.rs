//! How often one client may ask: a bucket for each token and for each address of those without one, and a bound on how many are kept.

use sha2::{Digest, Sha256};
use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Seconds' worth of requests that may come at once.
const BURST_SECONDS: f64 = 2.0;
/// More clients than this at a time share one bucket.
const MOST_CLIENTS: usize = 10_000;

#[derive(Debug)]
pub(crate) struct Rates {
    per_second: f64,
    buckets: Mutex<HashMap<Client, Bucket>>,
}

/// Who counts as one client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Client {
    /// A caller that we know, by the beginning of its token's hash.
    Token([u8; 8]),
    V4([u8; 4]),
    /// A household has a network of this size, and all its addresses.
    V6([u8; 8]),
    Others,
}

#[derive(Clone, Copy, Debug)]
struct Bucket {
    left: f64,
    at: Instant,
}

impl Rates {
    /// Zero for no limit.
    pub(crate) fn new(per_second: u32) -> Self {
        Self { per_second: f64::from(per_second), buckets: Mutex::default() }
    }

    /// Takes a turn, or says how long it is until there is one.
    pub(crate) fn take(&self, client: Client) -> Result<(), Duration> {
        self.take_at(client, Instant::now())
    }

    fn take_at(&self, mut client: Client, now: Instant) -> Result<(), Duration> {
        if self.per_second == 0.0 {
            return Ok(());
        }
        let most = (self.per_second * BURST_SECONDS).max(1.0);
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        if buckets.len() >= MOST_CLIENTS && !buckets.contains_key(&client) {
            // A bucket that is full again is as good as none.
            buckets.retain(|_, bucket| bucket.filled(now, self.per_second) < most);
            if buckets.len() >= MOST_CLIENTS {
                client = Client::Others;
            }
        }
        let bucket = buckets.entry(client).or_insert(Bucket { left: most, at: now });
        *bucket = Bucket { left: bucket.filled(now, self.per_second).min(most), at: now };
        if bucket.left >= 1.0 {
            bucket.left -= 1.0;
            return Ok(());
        }
        Err(Duration::from_secs_f64((1.0 - bucket.left) / self.per_second))
    }
}

impl Bucket {
    fn filled(&self, now: Instant, per_second: f64) -> f64 {
        self.left + now.saturating_duration_since(self.at).as_secs_f64() * per_second
    }
}

impl Client {
    pub(crate) fn of_token(token: &str) -> Self {
        let mut start = [0; 8];
        start.copy_from_slice(&Sha256::digest(token)[..8]);
        Self::Token(start)
    }

    pub(crate) fn of_address(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Self::V4(address.octets()),
            IpAddr::V6(address) => {
                let mut network = [0; 8];
                network.copy_from_slice(&address.octets()[..8]);
                Self::V6(network)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> Client {
        Client::of_address(IpAddr::from([192, 0, 2, last]))
    }

    #[test]
    fn a_burst_is_let_through_and_then_the_rate_holds() {
        let (rates, now) = (Rates::new(10), Instant::now());
        assert!((0..20).all(|_| rates.take_at(address(1), now).is_ok()));
        let wait = rates.take_at(address(1), now).unwrap_err();
        assert!(wait <= Duration::from_millis(100), "{wait:?}");
        assert!(rates.take_at(address(2), now).is_ok(), "another client has its own");
        assert!(rates.take_at(address(1), now + Duration::from_millis(101)).is_ok());
        assert!(rates.take_at(address(1), now + Duration::from_millis(101)).is_err());
    }

    #[test]
    fn one_network_is_one_client_and_zero_is_no_limit() {
        let (rates, now) = (Rates::new(1), Instant::now());
        let at = |last: u16| Client::of_address(IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, last]));
        assert!(rates.take_at(at(1), now).is_ok() && rates.take_at(at(2), now).is_ok());
        assert!(rates.take_at(at(3), now).is_err());
        assert!((0..1000).all(|_| Rates::new(0).take_at(at(1), now).is_ok()));
    }

    #[test]
    fn the_clients_that_are_kept_have_a_bound() {
        let (rates, now) = (Rates::new(1), Instant::now());
        for n in 0..u32::try_from(MOST_CLIENTS).unwrap() + 100 {
            let _ = rates.take_at(Client::of_address(IpAddr::from(n.to_be_bytes())), now);
        }
        assert!(rates.buckets.lock().unwrap().len() <= MOST_CLIENTS + 1);
    }
}
