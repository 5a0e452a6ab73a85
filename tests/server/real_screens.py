"""What real programs sent to terminals of 100 x 30, deflated."""

import zlib
from base64 import b64decode

_ENCODED = {
    "vim": (
        "eNq9VsFKAzEQPQqCX5BLKHhzJZlkd12CLQhCtaWIeoueZMsWNl0pe5Ae/Az/xp/xS5xJ6mKhHp2wZDZvXubl9HjC"
        "T7SyVSM8gFNO9cKPrYMgEG/EJRZQyjZ0TFU7ozZ0hAhCG29CH4umUuJlMLRVuOE3xd9bmpQj2Sinp6PXrg7n/Vs/"
        "kuX8TGpjrpCDja+PT+GLdTpIiXSs4m67FU/Cq9OQmiY2h0WPQpYfv4hnrdzkCIumEvF2ta6llt1S9k0tl6u2PjmO"
        "GPzGomKFQ2ZpfGSYfYYZGPaHYQ/MzQ9gxQGs3MeEr2x4l/+/UAifz6OkFZ+U5pMCPinDJ2X5pHI+qYJPquSTuuCT"
        "4nML4HML4HML4HML4HML4HML4HML4HML4HML4HMLYMwWMfRhqqQgagMlqBQxwy5lIiVkmbxZPFzfP8osGzpml/MS"
        "aUbZL6eQ6qDapOgp/HyIunRu6rbt/hwLrti95BtS18tD"
    ),
    "less": (
        "eNrlk7EKwjAYhNcg9AmyZNSlpmnaKkVcFATBF8gcbTBpC2Zw8tn925qhbVCQ4uKQI9xX6H+5BIttRPm6wIKxnObU"
        "YjAKvAm0KiWJSHUmtpDkrLQMZq3HPF7s8bjHSzxe6vGyvodFZupKmtDeLZnvT7sFjJsZLI4BrCUsjTSoQgq0RCWo"
        "RBKUIALKEW8+DMPwdlV1rcoLbF+/+jJiM1IXsx1lyqyReWBBzT9t8+jgKwOO1hE2JLEjo2K4I3xIEkeSIUkdSUc1"
        "OzLqaQWkFyOmnTN5mreX7WexPrWYmd7TfAJ/wTT2"
    ),
    "top": (
        "eNqNlEtvm0AUhfeV+gvY3E2kVKV05vIwEFVR41iyW5FattMNq0k8jlF5iUei9NcXcHSl4nE8LGYO8OkeOHdmjPia"
        "741vRnyNbmrEcyPGH8bljRFnTVHCF2B+6Lqhi9CWgByyJDcBGLS1rDqRFmIL4llW4kmGwC3mmMAsz+9H2z3UMWI7"
        "uHKCbHQX//z4YSPqP3U4fsEzAODw/+OmaERqKlE2Qqs2z5P8ydSqW6dSlifpcem6C6WUWz34b5E9JPJsCBfTsr2s"
        "PyljYNa4aFubemD9qgnmiQLk7BhMtpoVX4QmuE90f0YbbFR5w9kmRMkNRDIDZRfQ4cy1PO0ViTZz+RG/q6RULxxw"
        "Jp7Fjxp9ap2B7/Mj/KHd7b4+ise91A6gL6UVzPpFlOpdCqoevLNVlfw7wah3gNxa6tg9DCxnhItnkaRDb8/+69sw"
        "6WotF7dwv56tDh+x7Oa7Ra9+L1abfl7N1v20nq+gExfT5X03RrNowDeLaPYZpr+i6PvdLZy4VP6HtniOY0NVFM0B"
        "RDacLb0KBs0nAfaT57PefIiIxrDfuAyGYw1A29yIgys+HwRnpDgpJGWTcki5pDxSE1I+KfJA8kDyQPJA8kDyQPJA"
        "8kDyQPJA8rDfPP4BiDKgIA=="
    ),
}
SENT = {name: zlib.decompress(b64decode(text)) for name, text in _ENCODED.items()}
