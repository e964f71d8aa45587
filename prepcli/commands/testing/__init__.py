"""The family kit: check a model family on a tiny model, against transformers where it is installed.

`prep check-family CONFIG.json` runs it from the command line. In a test of your own:

    import prepcli as prep

    def test_my_family():
        for result in prep.check_family({"model_type": "my_family", "hidden_size": 4096}):
            assert result.outcome != "failed", result

torch and transformers are imported by the checks that compare with them. Without them these checks are skipped.
"""
