"""The application in this process over a small engine: keys, limits and errors. Real servers: `test_serve.py`."""

import asyncio
import hashlib

import httpx
import numpy as np
import pytest

from empo2_jax.errors import DataError
from empo2_jax.rollout.batching import Batcher
from empo2_jax.rollout.http_api import Limits, Served, make_app
from empo2_jax.rollout.wire import Model


class PlainEngine:
    """Samples the last prompt id again and again."""

    def __init__(self):
        self.policy_version, self.max_length, self.jobs, self.loaded = 0, 64, [], []

    @property
    def free_slots(self):
        return 2 - len(self.jobs)

    def check(self, request):
        pass

    def admit(self, jobs):
        self.jobs += jobs

    def decode(self, burst=None):
        for job in self.jobs:
            if not job.spans:
                job.spans.append((self.policy_version, 0))
            count = min(burst, job.request.sampling.max_tokens - len(job.ids))
            job.ids += [int(job.request.prompt_ids[-1])] * count
            job.logprobs += [-0.5] * count
            job.finish = "length" if len(job.ids) == job.request.sampling.max_tokens else None
        self.jobs = [job for job in self.jobs if not job.finish]

    def withdraw(self, job):
        self.jobs = [other for other in self.jobs if other is not job]

    def flush(self):
        pass

    def release_memory(self, parts):
        self.loaded.append(sorted(parts))

    def load(self, params, policy_version):
        self.policy_version = policy_version
        self.loaded.append(params)


def read(folder):
    if folder == "large":
        raise MemoryError("no room")
    if folder == "bad":
        raise DataError("bad: tensor model.norm.weight\nis missing")
    return folder


@pytest.fixture
def served():
    engine = PlainEngine()
    served = Served(
        batcher=Batcher(engine, burst=4),
        model=Model(vocab_size=40, token_count=38, max_length=64, stop_ids=(1,)),
        decode=lambda ids: " ".join(map(str, ids)),
        read=read,
        install=engine.load,
        checksums=lambda: {"a": "1", "b": "2"},
        info={"model_path": "m"},
        settings={"context_length": 64},
        limits=Limits(waiting=3, body_bytes=2000),
    )
    yield served
    served.batcher.close(0.0)
    served.batcher.join(20.0)


def talk(served, conversation, key=None, headers=None):
    """Run `conversation(client)`."""

    async def run():
        transport = httpx.ASGITransport(make_app(served, key))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
            return await conversation(client)

    return asyncio.run(run())


def ask(client, *ids, tokens=3, **fields):
    body = {"input_ids": list(ids), "sampling_params": {"max_new_tokens": tokens}, **fields}
    return client.post("/generate", json=body)


def test_one_and_several_requests_are_answered(served):
    async def conversation(client):
        one = (await ask(client, 5, 6, rid="mine", return_logprob=True)).json()
        assert (one["text"], one["output_ids"], one["meta_info"]["id"]) == ("6 6 6", [6, 6, 6], "mine")
        assert one["meta_info"]["output_token_logprobs"] == [[-0.5, 6, None]] * 3
        several = await client.post(
            "/generate", json={"input_ids": [[3], [4]], "sampling_params": {"max_new_tokens": 2}}
        )
        assert [entry["output_ids"] for entry in several.json()] == [[3, 3], [4, 4]]
        metrics = (await client.get("/metrics")).text
        assert "sglang:generation_tokens_total 7\n" in metrics
        assert "# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs 0\n" in metrics

    talk(served, conversation)


def test_without_the_key_nothing_but_health_is_answered(served):
    async def strange(client):
        for path in ("/model_info", "/server_info", "/metrics", "/flush_cache", "/nowhere"):
            response = await client.get(path)
            assert response.status_code == 401
            assert "secret" not in response.text and "Bearer KEY" in response.json()["error"]["message"]
        assert (await ask(client, 5)).status_code == 401
        assert [(await client.get(path)).status_code for path in ("/ready", "/health")] == [200, 200]

    talk(served, strange, key="secret")
    talk(served, strange, key="secret", headers={"Authorization": "Bearer secre"})
    talk(served, strange, key="secret", headers={"Authorization": "secret"})

    async def friend(client):
        assert (await ask(client, 5)).status_code == 200

    talk(served, friend, key="secret", headers={"Authorization": "Bearer secret"})


def test_errors_are_json(served):
    async def conversation(client):
        for response, status, message in (
            (await client.get("/nowhere"), 404, "no such path: /nowhere"),
            (await client.get("/generate"), 405, "/generate does not take GET"),
            (await client.post("/generate", content=b"{"), 400, "body: invalid JSON"),
            (await ask(client, 99), 400, "input_ids: ids 99 to 99"),
            (await client.post("/pause_generation", json={"mode": "nap"}), 400, "mode: input should be 'abort'"),
            (await client.post("/abort_request", json={}), 400, "rid or abort_all is needed"),
            (await client.post("/update_weights_from_disk", json={}), 400, "model_path: field required"),
            (await client.post("/update_weights_from_disk", json={"model_path": "a\0b"}), 400, "model_path"),
        ):
            assert response.status_code == status
            assert message in response.json()["error"]["message"]

    talk(served, conversation)


def test_too_large_a_body_is_refused(served):
    async def conversation(client):
        assert (await ask(client, *[5] * 2000)).status_code == 413

        async def pieces():
            for _ in range(100):
                yield b" " * 1000

        response = await client.post("/generate", content=pieces())
        assert response.status_code == 413
        assert response.json()["error"]["message"] == "the body is larger than 2000 bytes"

    talk(served, conversation)


def test_too_many_waiting_requests_are_sent_away(served):
    async def conversation(client):
        await client.post("/pause_generation", json={"mode": "in_place"})
        tasks = [asyncio.create_task(ask(client, 5, rid=f"r{number}")) for number in range(5)]  # 2 slots + 3 waiting
        while served.batcher.waiting < 5:
            await asyncio.sleep(0.001)
        refused = await ask(client, 5)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        in_use = await ask(client, 5, rid="r3")
        assert in_use.status_code == 503
        await client.post("/abort_request", json={"rid": "r3"})
        assert (await tasks[3]).json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert "in use" in (await ask(client, 5, rid="r2")).json()["error"]["message"]
        await client.post("/continue_generation", json={})
        done = await asyncio.gather(*(tasks[number] for number in (0, 1, 2, 4)))
        assert [response.json()["output_ids"] for response in done] == [[5, 5, 5]] * 4

    talk(served, conversation)


def test_a_batch_is_aborted_by_its_name(served):
    async def conversation(client):
        await client.post("/pause_generation", json={"mode": "retract"})
        body = {"input_ids": [[3], [4]], "rid": "batch", "sampling_params": {"max_new_tokens": 2}}
        several = asyncio.create_task(client.post("/generate", json=body))
        other = asyncio.create_task(ask(client, 5, rid="batch_x"))
        while served.batcher.waiting < 3:
            await asyncio.sleep(0.001)
        await client.post("/abort_request", json={"rid": "batch"})
        assert [entry["meta_info"]["finish_reason"]["type"] for entry in (await several).json()] == ["abort"] * 2
        await client.post("/continue_generation")
        assert (await other).json()["output_ids"] == [5, 5, 5]

    talk(served, conversation)


def test_weights_change_with_their_label_or_not_at_all(served):
    async def conversation(client):
        async def version():
            return (await client.get("/model_info")).json()["weight_version"]

        bad = await client.post("/update_weights_from_disk", json={"model_path": "bad", "weight_version": "v1"})
        assert bad.status_code == 400 and bad.json()["success"] is False
        assert bad.json()["error"]["message"].endswith("bad: tensor model.norm.weight is missing")
        assert await version() == "default"
        good = await client.post("/update_weights_from_disk", json={"model_path": "good", "weight_version": "v1"})
        assert good.status_code == 200 and good.json()["success"] is True
        assert await version() == "v1"
        assert (await ask(client, 5)).json()["meta_info"]["weight_version"] == "v1"
        await client.post("/update_weights_from_disk", json={"model_path": "better"})
        assert await version() == "v1"

    talk(served, conversation)


def test_a_label_memory_and_checksums_are_told_and_changed(served):
    async def conversation(client):
        renamed = await client.post("/update_weight_version", json={"new_version": "v7", "abort_all_requests": False})
        assert renamed.json()["success"] is True
        assert (await client.get("/model_info")).json()["weight_version"] == "v7"
        assert (await ask(client, 5)).json()["meta_info"]["weight_version"] == "v7"
        sums = (await client.post("/weights_checker", json={"action": "checksum"})).json()
        assert sums["success"] is True and sums["ranks"][0]["checksums"] == {"a": "1", "b": "2"}
        assert sums["per_engine_checksum"] == hashlib.sha256(b"a1b2").hexdigest()
        assert (await client.post("/weights_checker", json={"action": "snapshot"})).status_code == 400
        for path, tags in (("release", ["kv_cache"]), ("release", None), ("resume", ["weights"])):
            answer = await client.post(f"/{path}_memory_occupation", json={} if tags is None else {"tags": tags})
            assert (answer.status_code, answer.json()) == (200, None)
        state = (await client.get("/server_info")).json()["internal_states"][0]
        assert state["released"] == ["kv_cache"]
        refused = await ask(client, 5)
        assert refused.status_code == 400 and "kv_cache was given back" in refused.json()["error"]["message"]
        await client.post("/resume_memory_occupation", json={"tags": ["kv_cache", "weights"]})
        assert (await ask(client, 5)).status_code == 200
        assert (await client.post("/release_memory_occupation", json={"tags": ["disk"]})).status_code == 400

    talk(served, conversation)


def test_a_load_that_fails_says_which_weights_are_left(served):
    async def conversation(client):
        async def said(folder="bad"):
            return (await client.post("/update_weights_from_disk", json={"model_path": folder})).json()["message"]

        assert "the old ones are served: the host is out of memory" in await said("large")
        await client.post("/release_memory_occupation", json={"tags": ["kv_cache"]})
        assert (await said()).startswith("weights not updated, the old ones are served: bad: ")
        await client.post("/release_memory_occupation", json={"tags": ["weights"]})
        await client.post("/resume_memory_occupation", json={})
        assert (await said()).startswith("weights not updated, and the old ones were given back: none is there: bad: ")
        assert (await client.post("/update_weights_from_disk", json={"model_path": "good"})).status_code == 200
        assert (await said()).startswith("weights not updated, the old ones are served: bad: ")

    talk(served, conversation)


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("RESOURCE_EXHAUSTED: Out of memory")])
def test_a_load_that_ends_the_engine_is_answered(served, error):
    def install(weights, policy_version):
        raise error

    async def conversation(client):
        served.install = install
        for _ in range(2):  # the thread is gone the second time
            response = await asyncio.wait_for(client.post("/update_weights_from_disk", json={"model_path": "good"}), 20)
            assert response.status_code == 503
            assert response.json()["error"]["message"] == "the engine has stopped"
        assert served.batcher.failure is error

    talk(served, conversation)


def test_a_draining_or_broken_server_says_so(served):
    async def conversation(client):
        served.draining = True
        assert (await client.get("/ready")).status_code == 503
        assert (await ask(client, 5)).status_code == 503
        served.draining = False
        served.batcher.close(0.0)
        await asyncio.to_thread(served.batcher.join, 20.0)
        assert (await client.get("/health")).json()["error"]["message"] == "the engine has stopped"
        assert (await ask(client, 5)).status_code == 503

    talk(served, conversation)


def test_requests_without_a_seed_never_share_a_key(served):
    rids, keys = zip(*(served.fresh() for _ in range(100)), strict=True)
    assert len(set(rids)) == len({tuple(np.asarray(key).tolist()) for key in keys}) == 100
