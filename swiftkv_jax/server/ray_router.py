"""Ray Serve's request router for our replicas; it runs in the front (ray.py), which names each prompt."""

from ray.serve.request_router import (  # pyright: ignore[reportMissingImports]
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from swiftkv_jax.server.affinity import Affinity


class PrefixRouter(RequestRouter):
    """Sends prompts with the same beginning to one replica; a request's first argument is its names."""

    def initialize_state(self, **kwargs) -> None:
        self._affinity = Affinity()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return ranks of one replica each: a full one is skipped."""
        known = self.replica_queue_len_cache
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        busy = {name: known.get(replica.replica_id) or 0 for name, replica in by_id.items()}
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # before all are asked again
        return [[by_id[name]] for name in self._affinity.order(_names(pending_request), busy)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result) -> None:
        alive = {other.unique_id: other for other in self.curr_replicas}
        self._affinity.read(_names(pending_request), replica_id.unique_id, alive)


def _names(request: PendingRequest | None) -> list[bytes]:
    return request.args[0] if request is not None and request.args else []
