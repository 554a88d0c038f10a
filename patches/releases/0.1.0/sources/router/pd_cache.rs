//! The prefix trees of cache-aware policies in prefill/decode mode.

use crate::{core::WorkerRegistry, policies::PolicyRegistry};

/// Make the trees of the prefill and the decode policy know all workers of their kind. Nothing happens where a policy is
/// not cache-aware. Called whenever policies or workers come, in whichever order: a worker that is known stays as it is.
pub fn seed(policies: &PolicyRegistry, workers: &WorkerRegistry) {
    policies.init_pd_cache_aware_policies(&workers.get_prefill_workers(), &workers.get_decode_workers());
}
