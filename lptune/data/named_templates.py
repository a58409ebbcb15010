"""Chat templates by name, for checkpoints that bring none: `data.chat_template=chatml`.

Base models often have the special tokens of their family's chats, but no template. These write conversations
of texts as the published templates do: ChatML (Qwen), Gemma 1 to 3, Llama 3, Mistral (from Mistral Small 3
on), Phi 3 and 4-mini, and Zephyr, whose only special token is eos, which every tokenizer has. They write
neither tool calls nor reasoning: the instruct checkpoint of a family has the template that does.
"""

from collections.abc import Collection

_EACH, _END = "{% for message in messages %}", "{% endfor %}"
_PROMPT = "{{% if add_generation_prompt %}}{{{{ '{}' }}}}{{% endif %}}"
_GEMMA_TURN = (
    "{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' "
    "+ (system if loop.first else '') + message.content | trim + '<end_of_turn>\\n' }}"
)

NAMED_TEMPLATES = {
    "chatml": _EACH
    + "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    + _END
    + _PROMPT.format("<|im_start|>assistant\\n"),
    "gemma": "{% set has_system = messages[0].role == 'system' %}"
    "{% set system = messages[0].content + '\\n\\n' if has_system else '' %}"
    "{{ bos_token }}{% for message in (messages[1:] if has_system else messages) %}"
    + _GEMMA_TURN
    + _END
    + _PROMPT.format("<start_of_turn>model\\n"),
    "llama3": "{{ bos_token }}"
    + _EACH
    + "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim "
    "+ '<|eot_id|>' }}" + _END + _PROMPT.format("<|start_header_id|>assistant<|end_header_id|>\\n\\n"),
    "mistral": "{{ bos_token }}"
    + _EACH
    + "{% if message.role == 'assistant' %}{{ message.content + eos_token }}"
    "{% elif message.role == 'system' %}{{ '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}"
    "{% else %}{{ '[INST]' + message.content + '[/INST]' }}{% endif %}" + _END,
    "phi": _EACH
    + "{{ '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}"
    + _END
    + "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}",
    "zephyr": _EACH
    + "{{ '<|' + message.role + '|>\\n' + message.content + eos_token + '\\n' }}"
    + _END
    + _PROMPT.format("<|assistant|>\\n"),
}
"""Name -> jinja text."""

_TOKENS = {
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "mistral": ("[INST]", "[/INST]"),
    "phi": ("<|user|>", "<|assistant|>", "<|end|>"),
}
"""Of a user's and an assistant's turn, by which a family is known."""
_OF_SYSTEM = {"mistral": ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), "phi": ("<|system|>",)}


def _fitting(added: Collection[str]) -> str:
    return next((name for name, tokens in _TOKENS.items() if set(tokens) <= set(added)), "zephyr")


def suggested(special_texts: Collection[str]) -> str:
    """What to say to somebody without a template: the names, and the one for these special tokens."""
    fits = _fitting(special_texts)
    why = "by its special tokens" if fits in _TOKENS else "it ends answers by eos"
    return (
        f"set data.chat_template={fits} ({why}), another of {', '.join(NAMED_TEMPLATES)}, or jinja text; the "
        "family's instruct checkpoint has its own"
    )


def note_on_missing(name: str | None, added: Collection[str]) -> str:
    """What to say of the template `name` where a tokenizer with the added tokens `added` splits what the
    template writes as special tokens; empty where it splits none, and for templates without a name.
    """
    written = (*_TOKENS.get(name or "", ()), *_OF_SYSTEM.get(name or "", ()))
    missing = [token for token in written if token not in added]
    if not missing:
        return ""
    fits = _fitting(added)
    instead = f"; {fits} fits it" if fits != name else ""
    return (
        f"data.chat_template={name}: {', '.join(missing)} are no tokens of this tokenizer, which splits them "
        f"like any text{instead}"
    )
