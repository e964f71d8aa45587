"""The family kit: check a model family on a tiny model, against transformers where it is installed.

`prep check-family CONFIG.json` runs it from the command line. In a test of your own:

    from prepcli.testing import check_family

    def test_my_family():
        for result in check_family({"model_type": "my_family", "hidden_size": 4096}):
            assert result.outcome != "failed", result

torch and transformers are imported by the checks that compare with them. Without them these checks are skipped.
"""

from prepcli.testing.checks import CHECKS, Check
from prepcli.testing.kit import CheckResult, check_family
from prepcli.testing.tiny_config import scale_down

__all__ = ["CHECKS", "Check", "CheckResult", "check_family", "scale_down"]
