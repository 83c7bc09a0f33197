"""What all sections of the configuration are made of; the sections are in `config.py` and the other `config_*.py`."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

LARGEST = 2**31 - 1  # of whole numbers except seeds, and of what options count
LARGEST_SEED = 2**63 - 1
Probability = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no implicit conversions of text to numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _usable(cls, value: Any, info: Any) -> Any:
        """Refuse what no field can take: whole numbers that overflow in arrays, text that ends a path early."""
        most = LARGEST_SEED if info.field_name == "seed" else LARGEST
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, int) and abs(one) > most:
                raise ValueError(f"at most {most} is allowed")
            if isinstance(one, str) and "\0" in one:
                raise ValueError("text without the character 0 is allowed")
        return value
