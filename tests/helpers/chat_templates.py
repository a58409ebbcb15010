"""Chat templates of the shapes in use, and conversations to try them on."""

from typing import Any

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_WITHOUT_PROMPT = CHATML.split("{% if add_generation_prompt %}")[0]
CHATML_MARKED = (
    "{%- for message in messages %}{%- if message.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}"
    "{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}{{- '\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif "
    "%}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {{- message['content'] | trim }}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
# Meta's first Llama 3 template put the assistant's header at the end whatever it was asked.
LLAMA3_ALWAYS_PROMPTS = LLAMA3.replace("{%- if add_generation_prompt %}", "{%- if true %}")
MISTRAL = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] + '\n\n' %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set rest = messages %}
{%- endif %}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, roles must alternate') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- for message in messages -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""
# Drops the reasoning of turns before the last question, and writes an empty one where the last turn has none.
QWEN3 = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "# Tools\n\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_question=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and message.content is string %}
        {%- set ns.searching = false %}
        {%- set ns.last_question = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_question and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}
            {{- content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\n' }}{%- endif %}
            {%- set function = call.function if call.function else call %}
            {{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""
# The prompt opens the reasoning that earlier turns do not show.
QWEN3_THINKING = QWEN3.replace(
    """    {{- '<|im_start|>assistant\\n' }}
    {%- if enable""",
    """    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable""",
)
# DeepSeek's: no turn shows its reasoning, not even the last.
R1 = (
    "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{{- '<|assistant|>' + m.content.split('</think>')[-1] + eos_token }}"
    "{%- elif m.role == 'user' %}{{- '<|user|>' + m.content }}{%- else %}{{- m.content }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|><think>\n' }}{%- endif %}"
)
# Passes over what it does not know.
USER_AND_ASSISTANT = CHATML.replace(
    "{% for message in messages %}", "{% for message in messages if message.role in ('user', 'assistant') %}"
)
LOOPS_AND_DATES = (
    "{%- set seen = namespace(count=0) -%}{%- for message in messages -%}{%- if message.role == 'system' "
    "-%}{%- continue -%}{%- endif -%}"
    "{%- set seen.count = seen.count + 1 -%}{{ seen.count }} {{ message.role | upper }} [{{ "
    "strftime_now('%Y') }}]: "
    "{{ message.content }}{{ eos_token }}\n{%- if seen.count > 20 -%}{%- break -%}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '\n' }}{{ seen.count + 1 }} ASSISTANT [{{ strftime_now('%Y') }}]: "
    "{%- endif -%}"
)

WITHOUT_SPECIAL_TOKENS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

TEMPLATES: dict[str, str] = {
    "chatml": CHATML,
    "chatml_without_prompt": CHATML_WITHOUT_PROMPT,
    "chatml_marked": CHATML_MARKED,
    "llama3": LLAMA3,
    "llama3_always_prompts": LLAMA3_ALWAYS_PROMPTS,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "qwen3": QWEN3,
    "qwen3_thinking": QWEN3_THINKING,
    "r1": R1,
    "user_and_assistant": USER_AND_ASSISTANT,
    "loops_and_dates": LOOPS_AND_DATES,
}

SPECIAL = {
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "llama3_always_prompts": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>"},
    "r1": {"bos_token": "<s>", "eos_token": "</s>"},
}


def config(name: str) -> dict[str, Any]:
    """tokenizer_config.json's keys for the template `name`."""
    return {"chat_template": TEMPLATES[name], **SPECIAL.get(name, {"eos_token": "<|im_end|>"})}


def _say(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": _say("What is the capital of France?", "Paris."),
    "three turns": _say("Hi", "Hello!", "2 + 2?", "4", "And 3 + 3?", "It is 6."),
    "system": _say("Hi", "Hello!", "Bye", "Bye!", system="You are terse."),
    "spaces": _say("  leading and trailing  ", "  padded answer \n", "\nx", "\n\ny\n"),
    "unicode": _say("Wie heißt du? 你好 🎉🎉", "Ich heiße 世界 🎉", "Привет", "🎉"),
    "same words": _say("Paris", "Paris", "Paris", "Paris"),
    "quotes": _say("What does \"{{ x }}\" mean, & <b>?", "{% raw %} it's 'nothing' {% endraw %}"),
}  # fmt: skip

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds <two> numbers & more",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
TOOL_CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "What is 2 + 2?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}],
    },
    {"role": "tool", "content": '{"sum": 4}'},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "reasoning_content": "They are polite.", "content": "You are welcome."},
]
