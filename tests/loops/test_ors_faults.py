"""What an ORS server and the way to it can do to an episode: nothing runs twice, nothing is lost in silence."""

from __future__ import annotations

import asyncio
import json

import pytest

from harness_trainer.loops.base import EnvironmentFault, EpisodeLost, SetupFailure
from harness_trainer.loops.ors import session as ors_session
from harness_trainer.loops.ors.wire import EventReader
from tests.loops.ors_fake import RESULT, faking
from tests.loops.ors_playing import called, episode, ors, played
from tests.loops.playing import calls, says


@pytest.fixture
async def fake(monkeypatch):
    monkeypatch.setattr(ors_session, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(ors_session, "_LONGEST_PAUSE_S", 0.05)
    async with faking() as server:
        yield server


async def act(fake, **settings):
    """One call of the tool in an episode of its own."""
    async with ors(fake.url, **settings) as environment, episode(environment) as one:
        await one.start()
        reply = await called(one, "act")
        return reply, one.state


async def cut_at_once(request, fake):
    fake.runs += 1
    return await fake.stream(request, cut=True)


async def cut_before_end(request, fake):
    """The run begins and goes on; the stream breaks in the middle of its end event."""
    body = await request.json()
    fake.runs += body.get("task_id") is None
    return await fake.stream(request, ("task_id", "r1"), ("end", json.dumps(RESULT)), cut=True)


async def again(request, fake):
    """A server that does not know how to resume, and runs the tool again."""
    fake.runs += 1
    return await fake.stream(request, ("task_id", f"other-{fake.runs}"), ("end", json.dumps(RESULT)))


async def usual(request, fake):
    return await fake.usual(request)


async def test_a_stream_that_is_cut_before_its_end_event_is_resumed_and_the_tool_runs_once(fake):
    fake.answers["/call"] = [cut_before_end, cut_before_end, usual]
    reply, state = await act(fake)
    assert (reply.content, state.reward, fake.runs, fake.asked["/call"]) == ("done", 1.0, 1, 3)


async def test_a_stream_that_is_cut_before_the_run_has_a_name_loses_the_episode_and_runs_nothing_again(fake):
    fake.answers["/call"] = [cut_at_once, usual]
    with pytest.raises(EpisodeLost, match="may have run, and is not run again"):
        await act(fake)
    assert (fake.runs, fake.asked["/call"], fake.open) == (1, 1, set())


async def test_a_server_that_ran_the_tool_again_instead_of_resuming_it_loses_the_episode(fake):
    fake.answers["/call"] = [cut_before_end, again]
    with pytest.raises(EpisodeLost, match="a second time"):
        await act(fake)


async def test_a_run_that_the_server_has_forgotten_loses_the_episode(fake):
    async def forgotten(request, fake):
        return await fake.stream(request, ("error", "unknown task_id"))

    fake.answers["/call"] = [cut_before_end, forgotten]
    with pytest.raises(EpisodeLost, match="no longer knows"):
        await act(fake)


async def test_a_stream_that_is_cut_again_and_again_is_given_up(fake):
    fake.answers["/call"] = [cut_before_end]
    with pytest.raises(EpisodeLost, match="before its end event|payload|Connection"):
        await act(fake)
    assert fake.runs == 1


async def test_events_that_come_twice_count_once(fake):
    async def twice(request, fake):
        fake.runs += 1
        end = ("end", json.dumps(RESULT))
        return await fake.stream(request, ("task_id", "r1"), ("task_id", "r1"), end, end)

    fake.answers["/call"] = [twice]
    reply, state = await act(fake)
    assert (reply.content, state.rewards, fake.runs) == ("done", [1.0], 1)


@pytest.mark.parametrize("status", [402, 500, 502, 503, 404, 410])
async def test_a_call_that_fails_on_the_way_is_not_sent_again(fake, status):
    fake.answers["/call"] = [status, usual]
    with pytest.raises(EpisodeLost, match=str(status)):
        await act(fake)
    assert fake.asked["/call"] == 1 and fake.runs == 0


async def test_a_call_that_was_refused_before_it_ran_is_sent_again(fake):
    async def starting(request, fake):
        from aiohttp import web

        return web.json_response({"detail": "starting"}, status=503, headers={"X-Backend-State": "starting"})

    fake.answers["/call"] = [starting] * 8 + [429, usual]
    reply, _ = await act(fake)
    assert reply.content == "done" and fake.runs == 1 and fake.asked["/call"] == 10


async def test_a_call_that_the_server_does_not_take_is_the_models_mistake(fake):
    fake.answers["/call"] = [422, usual]
    async with ors(fake.url) as environment, episode(environment) as one:
        await one.start()
        refused, taken = await called(one, "act"), await called(one, "act")
    assert refused.failed and "told to say 422" in refused.content and taken.content == "done"


@pytest.mark.parametrize("answer", ["no JSON", "[]", '{"ok": true}'])
async def test_an_answer_that_makes_no_sense_loses_the_episode(fake, answer):
    async def nonsense(request, fake):
        return await fake.stream(request, ("task_id", "r1"), ("end", answer))

    fake.answers["/call"] = [nonsense]
    with pytest.raises(EpisodeLost, match="makes no sense"):
        await act(fake)


@pytest.mark.parametrize("path", ["/create_session", "/create"])
@pytest.mark.parametrize("status", [402, 429, 502, 503])
async def test_a_server_without_room_is_asked_again_and_then_the_episode_is_lost(fake, status, path):
    async with ors(fake.url, capacity_patience_s=0.3) as environment:
        (task,) = await environment.tasks()
        fake.answers[path] = [status, status, usual]
        async with environment.episode(task, "r"):
            assert len(fake.open) == 1
        fake.answers[path] = [status]
        with pytest.raises(EpisodeLost, match=str(status)):
            async with environment.episode(task, "r"):
                pass
    assert not fake.open, "what was half made is deleted"


async def test_an_environment_that_cannot_be_made_is_a_fault_of_its_task(fake):
    async with ors(fake.url, capacity_patience_s=0.1) as environment:
        fake.answers["/create"] = [500]
        with pytest.raises(SetupFailure, match="told to say 500"):
            async with episode(environment):
                pass
        fake.answers["/create"] = [400]
        with pytest.raises(SetupFailure, match="told to say 400"):
            async with episode(environment):
                pass


async def test_a_failing_list_of_tools_is_an_error_and_never_the_shared_list(fake):
    async with ors(fake.url) as environment:
        for status, error in ((402, EpisodeLost), (500, SetupFailure), (502, EpisodeLost)):
            fake.answers["/task_tools"] = [status]
            with pytest.raises(error, match=str(status)):
                async with episode(environment) as one:
                    await one.start()

        async def gone(request, fake):
            from aiohttp import web

            return web.json_response({"detail": "Active environment not found"}, status=404)

        fake.answers["/task_tools"] = [gone]
        with pytest.raises(EpisodeLost, match="Active environment not found"):
            async with episode(environment) as one:
                await one.start()
    assert fake.asked["/tools"] == 0 and not fake.open


async def test_a_server_from_before_task_tools_gives_its_shared_ones_and_a_warning(fake, caplog):
    async def no_route(request, fake):
        from aiohttp import web

        return web.json_response({"detail": "Not Found"}, status=404)

    async def shared(request, fake):
        from aiohttp import web

        return web.json_response({"tools": [{"name": "old", "description": "", "input_schema": None}]})

    async def prompt(request, fake):
        from aiohttp import web

        return web.json_response([{"type": "text", "text": "Old."}])

    fake.answers |= {"/task_tools": [no_route], "/tools": [shared], "/messages": [no_route], "/prompt": [prompt]}
    async with ors(fake.url) as environment, episode(environment) as one:
        assert await one.start() == [{"role": "user", "content": "Old."}]
        assert [tool.name for tool in one.tools] == ["old"]
    assert "no task tools" in caplog.text


@pytest.mark.parametrize("status", [401, 403])
async def test_a_key_that_is_refused_is_told_before_the_run(fake, status):
    for path in ("/list_environments", "/splits"):
        fake.answers = {path: [status]}
        with pytest.raises(EnvironmentFault, match="api-key-env"):
            async with ors(fake.url):
                pass


async def test_a_listing_that_fails_is_a_set_up_error(fake):
    async with ors(fake.url) as environment:
        fake.answers["/num_tasks"] = [500]
        with pytest.raises(EnvironmentFault, match="told to say 500"):
            await environment.tasks()
    with pytest.raises(EnvironmentFault, match="no ORS server answers"):
        async with ors("http://127.0.0.1:9"):
            pass


async def test_a_server_without_ranges_is_asked_for_each_task(fake):
    fake.answers["/task_range"] = [404]
    async with ors(fake.url) as environment:
        assert [task.metadata["row"]["n"] for task in await environment.tasks()] == [0]


async def test_pings_that_are_slow_or_fail_end_no_session(fake):
    async def slow(request, fake):
        await asyncio.sleep(0.3)
        return await fake.usual(request)

    fake.answers["/ping"] = [slow, 500, 404, 404, usual, 404, 404, usual]
    async with ors(fake.url, ping_interval_s=0.02) as environment, episode(environment) as one:
        await one.start()
        for _ in range(200):
            if fake.asked["/ping"] > 8:
                break
            await asyncio.sleep(0.02)
        assert fake.asked["/ping"] > 8 and (await called(one, "act")).content == "done"


@pytest.mark.parametrize("answers", [[410], [404, 404, 404]])
async def test_a_session_that_pings_find_gone_ends_the_call_that_waits_on_it(fake, answers):
    async def silent(request, fake):
        response = await fake.stream(request, ("task_id", "r1"))
        await asyncio.sleep(20)
        return response

    fake.answers |= {"/ping": answers, "/call": [silent]}
    async with asyncio.timeout(10):
        with pytest.raises(EpisodeLost, match="session is gone"):
            await act(fake, ping_interval_s=0.02)


async def test_a_stream_that_falls_silent_is_cut_and_resumed(fake):
    async def silent(request, fake):
        fake.runs += 1
        response = await fake.stream(request, ("task_id", "r1"))
        await asyncio.sleep(2)
        return response

    fake.answers["/call"] = [silent, usual]
    reply, _ = await act(fake, silence_s=0.2)
    assert reply.content == "done" and fake.runs == 1


async def test_a_call_that_is_cancelled_leaves_nothing_behind_and_the_session_is_deleted(fake):
    async def silent(request, fake):
        response = await fake.stream(request, ("task_id", "r1"))
        await asyncio.sleep(20)
        return response

    fake.answers["/call"] = [silent]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await act(fake)
    assert not fake.open and fake.asked["/delete"] == 1
    await asyncio.sleep(0.1)
    tasks = [repr(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not [task for task in tasks if "RequestHandler" not in task], "only the server's own are left"


@pytest.mark.parametrize(
    ("images", "told"),
    [
        (False, "See:\n[an image is left out: the model reads text only]"),
        (
            True,
            [
                {"type": "text", "text": "See:"},
                {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,aGk="}},
            ],
        ),
    ],
)
async def test_an_image_in_the_prompt_is_passed_on_or_becomes_a_note(fake, images, told):
    async def picture(request, fake):
        from aiohttp import web

        image = {"type": "image", "data": "aGk=", "mimeType": "image/jpeg"}
        return web.json_response([{"role": "user", "blocks": [{"type": "text", "text": "See:"}, image]}])

    fake.answers["/messages"] = [picture]
    ended, _ = await played(ors(fake.url), says("Seen."), images=images)
    assert ended.transcript.prompt == [{"role": "user", "content": told}]


async def test_a_conversation_with_reasoning_calls_and_results_becomes_messages(fake):
    async def conversation(request, fake):
        from aiohttp import web

        text = {"type": "text", "text": "So?"}
        call = {"type": "tool_call", "id": "c1", "name": "act", "input": {"x": 1}}
        result = {"type": "tool_result", "tool_call_id": "c1", "blocks": [{"type": "text", "text": "done"}]}
        thought = {"type": "reasoning", "text": "hm"}
        told = [("user", [text]), ("assistant", [thought, call]), ("user", [result, text])]
        return web.json_response([{"role": role, "blocks": blocks} for role, blocks in told])

    fake.answers["/messages"] = [conversation]
    async with ors(fake.url) as environment, episode(environment) as one:
        user, assistant, tool, last = await one.start()
    assert user == last == {"role": "user", "content": "So?"}
    assert tool == {"role": "tool", "tool_call_id": "c1", "content": "done"}
    assert (assistant["content"], assistant["reasoning_content"]) == ("", "hm")
    assert assistant["tool_calls"][0]["function"] == {"name": "act", "arguments": '{"x": 1}'}


async def test_an_infinite_reward_is_unknown_and_one_that_is_no_number_says_nothing(fake):
    fake.result = {"ok": True, "output": {"blocks": [], "reward": 0.5, "finished": False}}
    async with ors(fake.url) as environment, episode(environment) as one:
        await one.start()
        assert (await called(one, "act")).content == "(no output)"
        for value in (float("nan"), "1.0", None, [], {}):
            fake.result = {"ok": True, "output": {"blocks": [], "reward": value}}
            await called(one, "act")
        assert one.state.reward == 0.5 and one.state.rewards == [0.5, None, None, None, None, None]
    fake.result = {"ok": True, "output": {"blocks": [], "reward": float("inf")}}
    with pytest.raises(Exception, match="gave inf"):
        await played(ors(fake.url), calls(("act", {})), says("Done."))


async def test_a_block_of_an_unknown_type_becomes_a_note(fake):
    fake.result = {"ok": True, "output": {"blocks": [{"type": "video"}, {"type": "text", "text": "a"}]}}
    reply, _ = await act(fake)
    assert reply.content == "[a block of type video is left out]\na"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_put_together_from_pieces_of_any_size(size):
    raw = b": ping\r\n\r\nevent: task_id\r\ndata: r1\r\n\r\nevent: chunk\n"
    raw += b"data:  two spaces\n\nevent:end\rdata: \xc3\xa9\rid\r\r"
    reader = EventReader()
    events = [event for i in range(0, len(raw), size) for event in reader.feed(raw[i : i + size])]
    events += reader.feed(b"event: cut\ndata: never ended\n")
    assert events == [("task_id", "r1"), ("chunk", " two spaces"), ("end", "é")]


async def test_an_answer_of_five_megabytes_in_one_line_arrives(fake):
    fake.result = {"ok": True, "output": {"blocks": [{"type": "text", "text": "x y" * 1_700_000}], "reward": None}}
    reply, _ = await act(fake)
    assert len(reply.content) == 5_100_000
