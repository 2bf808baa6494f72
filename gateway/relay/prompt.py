"""From a checked call to the completions to run: tokenized, fitted to the context, seeded.

The last place where a request can be refused for what it says; after this only capacity, workers and time can fail it.
"""

import secrets
from dataclasses import replace

from engine.request_checks import check_leaves_a_token, check_token_ids
from engine.types import EngineRequest, RequestId
from gateway.relay.request import CompletionRequest, GenerateCall, ModelLimits
from gateway.relay.tokenizer import TokenizerService
from gateway.relay.validation import check_prompt_tokens
from kvrelay.errors import ContextTooLong, InvalidRequest

DEFAULT_MAX_TOKENS = 1_024
"""Most tokens where the call names no limit."""
_SEED_END = 1 << 64


async def resolve(
    call: GenerateCall,
    *,
    first_request_id: RequestId,
    tokenizer: TokenizerService,
    max_sequence_tokens: int,
    limits: ModelLimits,
    arrival: float,
    deadline: float | None,
) -> list[CompletionRequest]:
    """Return the call's completions, with request ids counting up from `first_request_id` and seeds from the call's.

    Raises:
        InvalidRequest: the prompt has no tokens or some that the model lacks, or min_tokens exceeds what can be made.
        ContextTooLong: prompt and output do not fit the context; names the field to change.
    """
    token_ids = await tokenizer.encode_prompt(call.prompt)
    check_prompt_tokens(call.prompt.field, len(token_ids), limits)
    # A tokenizer may have more tokens than its model.
    check_token_ids(call.prompt.field, token_ids, limits.vocab_size)
    num_left = max_sequence_tokens - len(token_ids)
    max_tokens = min(DEFAULT_MAX_TOKENS, num_left) if call.max_tokens is None else call.max_tokens
    if max_tokens > num_left:
        raise ContextTooLong(
            "sampling_params.max_tokens",
            f"the prompt has {len(token_ids)} tokens, which leaves {num_left} of {limits.room}, not {max_tokens}",
        )
    if call.sampling_params.min_tokens > max_tokens:
        raise InvalidRequest(
            "sampling_params.min_tokens",
            f"must be at most the {max_tokens} tokens that can be generated, not {call.sampling_params.min_tokens}",
        )
    bad_words = await tokenizer.encode_bad_words(call.bad_words)
    params = replace(
        call.sampling_params,
        max_tokens=max_tokens,
        # What the model lacks it never says.
        bad_words=tuple(word for word in bad_words if max(word) < limits.vocab_size),
    )
    # Once for all completions, which differ in their seeds only. The single fields are checked by now.
    check_leaves_a_token(params, limits.vocab_size, params.stop_token_ids)
    seed = secrets.randbits(64) if call.seed is None else call.seed
    return [
        CompletionRequest(
            EngineRequest(
                request_id=RequestId(first_request_id + index),
                token_ids=token_ids,
                sampling_params=replace(params, seed=(seed + index) % _SEED_END),
                num_prompt_tokens=len(token_ids),
                cache_salt=call.cache_salt,
                priority=call.priority,
            ),
            index=index,
            arrival=arrival,
            deadline=deadline,
        )
        for index in range(call.n)
    ]
