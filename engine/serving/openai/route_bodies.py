"""Body of each route of OpenAI's protocol."""

from __future__ import annotations

from collections.abc import Mapping

from weftline.engine.serving.openai.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    OpenAiBody,
    RerankBody,
    ScoreBody,
    SpeechBody,
    TranscriptionBody,
)
from weftline.engine.serving.openai.responses_api.body import ResponsesBody

BODIES: Mapping[str, type[OpenAiBody]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingBody,
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), RerankBody),
    **dict.fromkeys(("/v1/score", "/score"), ScoreBody),
    "/detokenize": DetokenizeBody,
    "/v1/audio/speech": SpeechBody,
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations"), TranscriptionBody),
}
"""Body of each route. /tokenize has that of a chat or of a completion."""
