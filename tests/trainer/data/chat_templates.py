"""Chat templates in the ways of published models: each has one property that makes turns hard to find.

They are written for the tests. The names say which models have the property.
"""

from __future__ import annotations

# The earlier turns of the assistant have no reasoning, and the last one always has a place for it (Qwen3).
LAST_REASONS = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'assistant' %}
        {%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.last %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>' + content + '</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- else %}{{ '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
# The system text is in the last message of the user (Mistral).
SYSTEM_IN_LAST = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '[INST]' + (system + '\\n\\n' if system and m == users[-1] else '') + m.content + '[/INST]' }}
    {%- elif m.role == 'assistant' %}{{ m.content + '</s>' }}
    {%- endif %}
{%- endfor %}
"""
# The next role ends a turn (GLM).
NEXT_ROLE_ENDS = """\
{%- for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content | trim }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
"""
# The last turn ends with another token than those before it (gpt-oss).
LAST_RETURNS = """\
{{- 'Today: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- for m in messages %}
    {{- '<|start|>' + m.role }}
    {%- if m.thinking and loop.last %}{{ '<|analysis|>' + m.thinking + '<|end|><|start|>assistant' }}{% endif %}
    {{- '<|message|>' + m.content + ('<|return|>' if loop.last and m.role == 'assistant' else '<|end|>') }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""
# Arguments are texts, and calls are shown only if the content is null. Reasoning is never shown (DeepSeek).
TEXT_ARGUMENTS = """\
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '<User>' + m.content }}
    {%- elif m.role == 'assistant' and m.content is none %}
        {{- '<Assistant>' }}
        {%- for call in m.tool_calls %}
            {{- '<call>' + call.function.name + ' ' + call.function.arguments + '</call>' }}
        {%- endfor %}
        {{- '<eos>' }}
    {%- elif m.role == 'assistant' %}{{ '<Assistant>' + m.content.split('</think>')[-1] + '<eos>' }}
    {%- else %}{{ '<output>' + m.content + '</output>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<Assistant><think>\\n' }}{% endif %}
"""
# A text without a prompt for the assistant ends with the end token (Phi-3).
END_OF_TEXT = """\
{%- for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}
{{- '<|assistant|>\\n' if add_generation_prompt else eos_token }}
"""
# The prompt opens the reasoning, which earlier turns do not have. Calls are XML (Qwen3.5, Nemotron 3).
OPEN_THINKING = """\
{%- if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' and loop.last %}
        {{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- (m.content or '') | trim }}
    {%- for call in m.tool_calls or [] %}
        {{- '<tool_call><function=' + call.function.name + '>' }}
        {%- for name, value in call.function.arguments | items %}
            {{- '<parameter=' + name + '>' + value | string + '</parameter>' }}
        {%- endfor %}
        {{- '</function></tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}
"""
# Markers of generated text, and calls in the syntax of Python (LFM2).
PYTHON_CALLS = """\
{{- bos_token }}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}
        {%- if m.thinking and loop.last %}{{ '<think>' + m.thinking + '</think>' }}{% endif %}
        {{- m.content or '' }}
        {%- for call in m.tool_calls or [] %}
            {{- '[' + call.function.name + '(' }}
            {%- for name, value in call.function.arguments | items %}
                {{- (', ' if not loop.first else '') + name + '=' + value | string }}
            {%- endfor %}
            {{- ')]' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- else %}
        {{- m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
