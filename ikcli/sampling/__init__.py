"""Choose the next token from logits: parameters, samplers and their order, penalties, probabilities."""

from ikcli.sampling.candidates import NoTokenError
from ikcli.sampling.params import DEFAULT_SAMPLERS, SamplerParams, check_params, sampler_names
from ikcli.sampling.sampler import Sampled, Sampler, token_logprobs
from ikcli.sampling.vocab import SamplerVocab

__all__ = [
    "DEFAULT_SAMPLERS",
    "NoTokenError",
    "Sampled",
    "Sampler",
    "SamplerParams",
    "SamplerVocab",
    "check_params",
    "sampler_names",
    "token_logprobs",
]
