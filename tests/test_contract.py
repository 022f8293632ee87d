"""Every variant keeps the contract, through the door that a stranger would use."""

import attnzoo

for name in attnzoo.list_variants():

    @attnzoo.testing.parametrize(name)
    def test_contract(check):
        check()

    globals()[f"test_{name}"] = test_contract
del test_contract
