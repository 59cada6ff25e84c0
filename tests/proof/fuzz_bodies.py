"""Valid requests with something of everything in them, one list a dialect, for the fuzz run to break.

Shaped after what coding agents really send: parts, images, thoughts, parallel calls, results out of order, odd keys.
"""

from __future__ import annotations

from typing import Any

_SCHEMA = {
    "type": "object",
    "properties": {"command": {"type": "string", "description": "what to run"}, "n": {"type": "integer"}},
    "required": ["command"],
}
_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

_CHAT: list[dict[str, Any]] = [
    {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    {
        "model": "m",
        "messages": [
            {
                "role": "system",
                "content": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
            },
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b 🙂"}]},
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "reasoning_content": "because",
                "tool_calls": [
                    {"id": "c1", "type": "function", "index": 0, "function": {"name": "bash", "arguments": '{"n": 1}'}},
                    {"id": "c2", "type": "function", "function": {"name": "bash", "arguments": ""}},
                ],
            },
            {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "out"}]},
            {"role": "tool", "tool_call_id": "c1", "name": "bash", "content": "ls"},
            {"role": "developer", "content": "a reminder"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "see"},
                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_PIXEL}"}},
                ],
            },
        ],
        "tools": [{"type": "function", "function": {"name": "bash", "description": "d", "parameters": _SCHEMA}}],
        "tool_choice": {"type": "function", "function": {"name": "bash"}},
        "parallel_tool_calls": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 7,
        "stop": ["x"],
        "max_completion_tokens": 64,
        "n": 1,
        "logit_bias": {"5": 1},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        "chat_template_kwargs": {"enable_thinking": False},
        "user": "u",
        "metadata": {"a": "b"},
    },
]

_RESPONSES: list[dict[str, Any]] = [
    {"model": "m", "input": "hi"},
    {
        "model": "m",
        "instructions": "be brief",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "see 🙂"},
                    {"type": "input_image", "image_url": f"data:image/png;base64,{_PIXEL}", "detail": "low"},
                ],
            },
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "s"}],
                "content": [{"type": "reasoning_text", "text": "because"}],
                "encrypted_content": None,
            },
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "I go", "annotations": []}],
            },
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "bash", "arguments": '{"command": "ls"}'},
            {"type": "custom_tool_call", "id": "ct_1", "call_id": "c2", "name": "apply_patch", "input": "*** Begin\n"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "ok"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "a"}]},
        ],
        "tools": [
            {"type": "function", "name": "bash", "description": "d", "strict": False, "parameters": _SCHEMA},
            {
                "type": "custom",
                "name": "apply_patch",
                "description": "d",
                "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"},
            },
            {"type": "web_search"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "high", "summary": "auto"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}, "verbosity": "low"},
        "include": ["reasoning.encrypted_content"],
        "max_output_tokens": 64,
        "temperature": 0.7,
        "top_p": 0.9,
        "store": False,
        "stream": True,
        "truncation": "disabled",
        "previous_response_id": None,
        "prompt_cache_key": "k",
        "metadata": {"a": "b"},
    },
]

_ANTHROPIC: list[dict[str, Any]] = [
    {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]},
    {
        "model": "m",
        "max_tokens": 64,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0.aa1; cch=00001;"},
            {"type": "text", "text": "You are brief.", "cache_control": {"type": "ephemeral", "ttl": "5m"}},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "see 🙂"},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": _PIXEL}},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "because", "signature": "c2ln"},
                    {"type": "redacted_thinking", "data": "eHg="},
                    {"type": "text", "text": "I go"},
                    {"type": "tool_use", "id": "t1", "name": "bash", "input": {"command": "ls"}},
                    {"type": "tool_use", "id": "t2", "name": "bash", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t2", "content": "b", "is_error": True},
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a"}]},
                    {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
                ],
            },
            {"role": "system", "content": "a reminder"},
        ],
        "tools": [
            {"name": "bash", "description": "d", "input_schema": _SCHEMA},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        ],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "stop_sequences": ["x"],
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "stream": True,
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
    },
]

_GEMINI: list[dict[str, Any]] = [
    {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
    {
        "systemInstruction": {"role": "user", "parts": [{"text": "be brief"}]},
        "contents": [
            {"role": "user", "parts": [{"text": "see 🙂"}, {"inlineData": {"mimeType": "image/png", "data": _PIXEL}}]},
            {
                "role": "model",
                "parts": [
                    {"text": "because", "thought": True, "thoughtSignature": "c2ln"},
                    {"text": "I go"},
                    {"functionCall": {"id": "c1", "name": "bash", "args": {"command": "ls"}}},
                    {"functionCall": {"name": "bash", "args": {}}, "thoughtSignature": "skip"},
                ],
            },
            {
                "role": "user",
                "parts": [
                    {"functionResponse": {"name": "bash", "response": {"output": "b"}}},
                    {"functionResponse": {"id": "c1", "name": "bash", "response": {"output": "a"}}},
                ],
            },
        ],
        "tools": [
            {"functionDeclarations": [{"name": "bash", "description": "d", "parametersJsonSchema": _SCHEMA}]},
            {
                "functionDeclarations": [
                    {"name": "now", "parameters": {"type": "OBJECT", "properties": {"x": {"type": "STRING"}}}}
                ]
            },
            {"googleSearch": {}},
        ],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["bash"]}},
        "generationConfig": {
            "temperature": 1,
            "topP": 0.95,
            "topK": 64,
            "maxOutputTokens": 64,
            "candidateCount": 1,
            "seed": 7,
            "stopSequences": ["x"],
            "responseMimeType": "application/json",
            "responseSchema": {"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}},
            "thinkingConfig": {"includeThoughts": True, "thinkingBudget": -1},
        },
        "safetySettings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
        "labels": {"a": "b"},
    },
]

BODIES = {"openai_chat": _CHAT, "openai_responses": _RESPONSES, "anthropic": _ANTHROPIC, "gemini": _GEMINI}
