"""What tests share. Its assertions say as much as theirs."""

import pytest

pytest.register_assert_rewrite("support.commands")
