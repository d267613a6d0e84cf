"""What launchers set, and whom a process joins then: JAX's own detection runs, and joins nobody here."""

import sys
import types

import jax
import pytest
import yaml
from jax._src import cloud_tpu_init, distributed
from jax._src.clusters import cloud_tpu_cluster
from processes_made import ROOT, finish, start

from swiftkv_jax.common import processes
from swiftkv_jax.common.errors import UsageError


def variables(text: str) -> dict[str, str]:
    """Environment variables, as NAME=VALUE between spaces."""
    return dict(pair.split("=", 1) for pair in text.split())


SRUN = variables(  # srun -N4 -n8, the sixth process
    "SLURM_JOB_ID=70001 SLURM_JOB_NODELIST=gpu[017-019,023] SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=4 "
    "SLURM_STEP_NODELIST=gpu[017-019,023] SLURM_STEP_NUM_TASKS=8 SLURM_NTASKS=8 SLURM_NODEID=2 "
    "SLURM_PROCID=5 SLURM_LOCALID=1"
)
SBATCH = variables(  # a batch script itself, outside of srun
    "SLURM_JOB_ID=70001 SLURM_JOB_NODELIST=gpu[017-018] SLURM_NODELIST=gpu[017-018] SLURM_NTASKS=16 "
    "SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0"
)
OPEN_MPI_5 = variables(
    "OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_RANK=3 "
    "OMPI_COMM_WORLD_LOCAL_RANK=1 PMIX_NAMESPACE=prterun-node1-4711@1"
)
OPEN_MPI_4 = OPEN_MPI_5 | variables(
    "OMPI_MCA_orte_hnp_uri=1531576320.0;tcp://10.96.0.1,10.148.0.1:34911 OMPI_MCA_ess_base_vpid=3"
)
HYDRA = variables("PMI_SIZE=4 PMI_RANK=3 PMI_FD=9 MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1")  # of MPICH, Intel MPI
MVAPICH2 = variables("MV2_COMM_WORLD_SIZE=4 MV2_COMM_WORLD_RANK=3 MV2_COMM_WORLD_LOCAL_RANK=1")
POD = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
    "HOSTNAME": "swiftkv-train-nodes-0-1-x7k2p",
}
INDEXED = POD | {"JOB_COMPLETION_INDEX": "1"}
TPU_POD = INDEXED | {  # GKE's, on the third host of a v5p slice of 2x2x4
    "JOB_COMPLETION_INDEX": "2",
    "TPU_WORKER_ID": "2",
    "TPU_WORKER_HOSTNAMES": ",".join(f"swiftkv-train-slice-0-{i}.swiftkv-train" for i in range(4)),
    "TPU_ACCELERATOR_TYPE": "v5p-32",
    "TPU_TOPOLOGY": "2x2x4",
    "TPU_SKIP_MDS_QUERY": "true",
}
TWO_SLICES = TPU_POD | {
    "MEGASCALE_COORDINATOR_ADDRESS": "swiftkv-train-slice-0-0.swiftkv-train",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
}
ONE_TPU_HOST = POD | {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_SKIP_MDS_QUERY": "true"}
NAMED = {"JAX_COORDINATOR_ADDRESS": "node1:8476"}


METADATA = {  # of the second of two TPU VMs of Compute Engine, which has no variables
    "agent-worker-number": "1",
    "worker-network-endpoints": "unknown:unknown:10.164.0.5,unknown:unknown:10.164.0.6",
    "tpu-env": "ACCELERATOR_TYPE: 'v4-16'\nWORKER_ID: '1'\n",
}


def jobset() -> dict[str, str]:
    """The variables of the second pod of launch/jobset-h100.yaml."""
    spec = yaml.safe_load((ROOT / "launch" / "jobset-h100.yaml").read_text())["spec"]
    pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return INDEXED | {each["name"]: each.get("value", "1") for each in pod["containers"][0]["env"]}


@pytest.fixture
def joined(monkeypatch):
    """Start in an environment; (address, processes, this one, its devices) of what is joined, or None."""
    found: dict = {}

    class Runtime:
        def get_distributed_runtime_service(self, address, count, **_):
            return None

        def get_distributed_runtime_client(self, address, index, **_):
            found.update(address=address, index=index)
            return types.SimpleNamespace(connect=lambda: None)

    def asked(environ, wanted=None, tpu=False, metadata=types.MappingProxyType({})):
        found.clear()
        monkeypatch.setattr(
            cloud_tpu_cluster, "get_metadata", lambda key: (metadata.get(key, ""), 200 if metadata else 404)
        )
        state = distributed.State()
        for name in list(processes.os.environ):
            monkeypatch.delenv(name)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        for module in (cloud_tpu_init, cloud_tpu_cluster, distributed.clusters.cluster):
            monkeypatch.setattr(module, "running_in_cloud_tpu_vm", tpu)
        monkeypatch.setattr(distributed, "global_state", state)
        visible = jax.config.values["jax_cuda_visible_devices"]
        try:
            processes.start(wanted, environ)
            devices = jax.config.values["jax_cuda_visible_devices"]
        finally:
            jax.config.update("jax_cuda_visible_devices", visible)
            jax.config.update("jax_rocm_visible_devices", visible)
        return (found["address"], state.num_processes, found["index"], devices) if found else None

    monkeypatch.setattr(distributed, "_jax", Runtime())
    monkeypatch.setattr(distributed.State, "initialize_preemption_sync_manager", lambda self: None)
    monkeypatch.setattr(distributed.xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr("socket.gethostbyname", lambda name: "10.0.0.2")
    return asked


FIRST_POD = "swiftkv-train-slice-0-0.swiftkv-train:8482"
JOINED = {
    "srun": (SRUN, ("gpu017:61809", 8, 5, "1")),
    "srun, two names": (SRUN | {"SLURM_STEP_NODELIST": "a,b"}, ("a:61809", 8, 5, "1")),
    "srun --mpi=pmi2": (SRUN | {"PMI_SIZE": "8", "PMI_RANK": "5"}, ("gpu017:61809", 8, 5, "1")),
    "srun, with an address": (SRUN | NAMED, ("node1:8476", 8, 5, "1")),
    "Open MPI 4": (OPEN_MPI_4, ("10.96.0.1:62624", 4, 3, "1")),
    "Open MPI 5, with an address": (OPEN_MPI_5 | NAMED, ("node1:8476", 4, 3, "1")),
    "MPICH, with an address": (HYDRA | NAMED, ("node1:8476", 4, 3, "1")),
    "MPICH, in a job of SLURM": (HYDRA | SBATCH | NAMED, ("node1:8476", 4, 3, "1")),
    "MVAPICH2, with an address": (MVAPICH2 | NAMED, ("node1:8476", 4, 3, "1")),
    "JobSet for H100": (jobset(), ("swiftkv-train-nodes-0-0.swiftkv-train:8476", 2, 1, "all")),
    "all named": (
        NAMED | {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1", "JAX_LOCAL_DEVICE_IDS": "2,3"},
        ("node1:8476", 2, 1, "2,3"),
    ),
}
ON_TPU = {
    "a slice": (TPU_POD, (FIRST_POD, 4, 2, "all")),
    "two slices": (TWO_SLICES, (FIRST_POD, 8, 6, "all")),
    "one host": (ONE_TPU_HOST, ("localhost:8482", 1, 0, "all")),
}


@pytest.mark.parametrize("wanted", [None, True])
@pytest.mark.parametrize("environ, want", JOINED.values(), ids=JOINED)
def test_the_processes_of_a_launcher_are_joined(environ, want, wanted, joined):
    assert joined(environ, wanted) == want


@pytest.mark.parametrize("environ, want", ON_TPU.values(), ids=ON_TPU)
def test_the_hosts_of_a_tpu_slice_are_joined(environ, want, joined):
    assert joined(environ, tpu=True) == want


def test_tpu_machines_of_compute_engine_are_joined(joined):
    assert joined({}, tpu=True, metadata=METADATA) == ("10.164.0.5:8482", 2, 1, "all")
    assert joined({}, tpu=True) is None


ALONE = {
    "nothing": {},
    "a batch script": SBATCH,
    "a server's pod": POD,
    "mpirun -n 1": HYDRA | {"PMI_SIZE": "1"},
}


@pytest.mark.parametrize("environ", ALONE.values(), ids=ALONE)
def test_without_peers_a_process_runs_alone_or_fails_if_distributed(environ, joined):
    assert joined(environ) is None
    with pytest.raises(UsageError):
        joined(environ, True)


@pytest.mark.parametrize(
    "environ", [SRUN, OPEN_MPI_4, TPU_POD, jobset()], ids=["srun", "mpirun", "TPU", "pod"]
)
def test_with_no_distributed_a_process_ignores_its_launcher(environ, joined):
    assert joined(environ, False, tpu=True) is None


@pytest.mark.parametrize("environ", [OPEN_MPI_5, HYDRA, MVAPICH2], ids=["Open MPI 5", "MPICH", "MVAPICH2"])
def test_an_mpirun_that_does_not_say_where_process_0_is_is_refused(environ, joined):
    """Else each would be a run of its own, in the same folder."""
    with pytest.raises(UsageError, match="set JAX_COORDINATOR_ADDRESS"):
        joined(environ)


@pytest.mark.parametrize(
    "environ, want", [(POD, None), (jobset(), 1)], ids=["a server's", "one that is named"]
)
def test_kubernetes_is_not_queried_outside_an_indexed_job(environ, want, joined, monkeypatch):
    """It may have no token of a service account, without which its client raises an error of its own."""

    class ConfigException(Exception):
        pass

    def no_token():
        raise ConfigException("Service token file does not exist.")

    config = types.SimpleNamespace(load_incluster_config=no_token)
    monkeypatch.setitem(sys.modules, "kubernetes", types.SimpleNamespace(config=config))
    assert (joined(environ) or [None] * 3)[2] == want
    with pytest.raises(UsageError, match="Service token file does not exist"):
        joined(INDEXED)


MPICH = """
import os, sys
import jax
from swiftkv_jax.common import processes

os.environ["PMI_SIZE"], os.environ["PMI_RANK"] = "2", os.environ.pop("JAX_PROCESS_ID")
del os.environ["JAX_NUM_PROCESSES"]
processes.start(True, os.environ)
print(jax.process_index(), jax.process_count(), processes.any_process(jax.process_index() == 1))
"""


@pytest.mark.slow
def test_two_processes_of_an_mpiexec_with_an_address_find_each_other():
    """As MPICH starts them; they are told where process 0 is, and nothing else."""
    done = finish(start([[sys.executable, "-c", MPICH]] * 2, PYTHONPATH=str(ROOT)), 120)
    assert [each.stdout.splitlines()[-1] for each in done] == ["0 2 True", "1 2 True"], done
