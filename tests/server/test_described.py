"""`/openapi.json`: all of the server is in it, and requests made from it by schemathesis do no harm."""

import hypothesis
import hypothesis.strategies as st
import pytest
import requests
import schemathesis
from http_server import Running, make_llm, unharmed
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

pytestmark = pytest.mark.filterwarnings(  # schemathesis' own
    "ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning"
)
WARM_UP = True
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@pytest.fixture(scope="module")
def described(running) -> dict:
    return running.http.get("/openapi.json").raise_for_status().json()


def test_every_route_is_described_and_answers_as_described(served, described):
    routes = {(o.path.replace(":path}", "}"), o.method.lower()) for o in served.api.operations}
    assert routes == {(path, method) for path, item in described["paths"].items() for method in item}
    for path, method in routes:
        answer = served.http.request(method, path.format(name="tiny"))
        assert answer.status_code == (415 if method == "post" else 200)
        content = described["paths"][path][method]["responses"]["200"]["content"]
        assert method == "post" or answer.headers["content-type"].partition(";")[0] in content


def test_the_description_says_which_routes_need_a_key(described):
    assert "security" not in described
    with Running(make_llm(), warm_up=False, api_keys=("one",)) as server:
        keyed = server.http.get("/openapi.json").json()
        for path, item in keyed["paths"].items():
            for method, operation in item.items():
                said = operation.get("security", keyed["security"])
                answer = requests.request(method, server.url + path, timeout=30)
                assert (answer.status_code == 401) == (said == [{"key": []}]) == (said != [])


@pytest.mark.slow("40")
@pytest.mark.parametrize("examples", [40, pytest.param(5000, marks=pytest.mark.soak)])
def test_requests_generated_from_the_description_do_no_harm(served, described, examples):
    """So many that fit the description, and as many that do not; none does harm."""
    schema = schemathesis.openapi.from_dict(described)
    seen: dict[int, int] = {}
    modes = [schema.as_strategy(generation_mode=mode) for mode in GenerationMode]

    def harm() -> None:
        with requests.Session() as session:

            @hypothesis.settings(max_examples=2 * examples)
            @hypothesis.given(st.one_of(modes))
            def send(case):
                answer = case.call(base_url=served.url, session=session, timeout=30)
                seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
                too_large = answer.status_code == 413  # a refusal that schemathesis does not know as one
                case.validate_response(answer, checks=CHECKS[:-1] if too_large else CHECKS)
                assert answer.headers["x-request-id"]

            send()

    unharmed(served, harm)
    assert seen[200] > examples // 10 and seen[400] > examples // 10, seen
