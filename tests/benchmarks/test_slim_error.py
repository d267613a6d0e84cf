"""`benchmarks.slim_error`: a row of its table is what slim.json says."""

from benchmarks.slim_error import row


def test_a_row_has_the_errors_of_each_way_and_the_costs_of_the_whole_model():
    def candidate(matrix, error):
        return {"form": "k", "matrix": matrix, "error": error}

    found = {
        "rows": [
            {"candidates": [candidate("exact", 0.183), candidate("calibrated", 0.0461)]},
            {"candidates": [candidate("calibrated", 8.64e-6), candidate("exact", 2.0)]},
        ],
        "every_row": {
            "k exact": {"kl": 0.0183, "agreement": 0.963},
            "k calibrated": {"kl": 5.61e-5, "agreement": 0.9934},
        },
        "keys_and_values": {"kl": 0.0, "agreement": 1.0},
    }
    errors, kls = ["0.18, 2", "0.046, 8.6e-6"], ["1.8e-2", "5.6e-5", "0"]
    assert row("int8", found) == ["int8", *errors, *kls, "0.963 / 0.993 / 1.000"]
