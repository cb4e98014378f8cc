"""Exits with 0 if the gateway in this container answers /health, else with 1: the image's HEALTHCHECK.

SEKISHO_HEALTH_URL names another address, for a gateway with TLS or another port.
"""

import os
import ssl
import sys
import urllib.error
import urllib.request

PATIENCE_S = 4
url = os.environ.get("SEKISHO_HEALTH_URL", "http://127.0.0.1:8080/health")

# The certificate is for the name that clients use, not for loopback. A proxy of the environment is for the way out.
certificates = ssl.create_default_context()
certificates.check_hostname, certificates.verify_mode = False, ssl.CERT_NONE
opener = urllib.request.build_opener(
    urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=certificates)
)
try:
    with opener.open(url, timeout=PATIENCE_S) as answer:
        sys.exit(answer.status != 200)
except (OSError, ValueError) as error:
    print(f"{url}: {error}", file=sys.stderr)
    sys.exit(1)
