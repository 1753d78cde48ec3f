"""A hub on this machine: the part of its HTTP interface that an upload uses, with files kept in memory."""

import base64
import hashlib
import json

from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"


class HubServer:
    """What clients have sent to it, by repository and branch."""

    def __init__(self):
        self.address = ""
        self.repositories = {}
        self.files = {}
        self.blobs = {}
        self.asked = []
        self.refuses = None
        """Status of every answer to a commit, if not None."""

    def app(self):
        routes = [
            Route("/api/whoami-v2", self._whoami),
            Route("/api/repos/create", self._create, methods=["POST"]),
            Route("/api/validate-yaml", self._valid, methods=["POST"]),
            Route("/api/models/{owner}/{name}/branch/{branch}", self._branch, methods=["POST"]),
            Route("/api/models/{owner}/{name}/preupload/{branch}", self._preupload, methods=["POST"]),
            Route("/api/models/{owner}/{name}/commit/{branch}", self._commit, methods=["POST"]),
            Route("/{owner}/{name}.git/info/lfs/objects/batch", self._batch, methods=["POST"]),
            Route("/blobs/{digest}", self._blob, methods=["PUT"]),
        ]
        return Starlette(routes=routes)

    def _known(self, request):
        self.asked.append(request.url.path)
        return request.headers.get("authorization") == f"Bearer {TOKEN}"

    async def _whoami(self, request):
        if not self._known(request):
            return JSONResponse({"error": "Invalid credentials in Authorization header"}, status_code=401)
        return JSONResponse({"name": "me", "type": "user", "auth": {"type": "access_token"}})

    async def _create(self, request):
        assert self._known(request)
        body = await request.json()
        name = f"{body.get('organization') or 'me'}/{body['name']}"
        if name in self.repositories:
            there = {"error": "You already created this model repo", "url": f"{self.address}/{name}", "name": name}
            return JSONResponse(there, status_code=409)
        self.repositories[name] = body
        return JSONResponse({"url": f"{self.address}/{name}", "name": name})

    async def _valid(self, request):
        content = (await request.json())["content"]
        errors = [] if content.startswith("---\n") else [{"message": "no front matter"}]
        return JSONResponse({"errors": errors, "warnings": []})

    async def _branch(self, request):
        assert self._known(request)
        return JSONResponse({})

    async def _preupload(self, request):
        assert self._known(request)
        files = (await request.json())["files"]
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for file in files
        ]
        return JSONResponse({"files": modes})

    async def _batch(self, request):
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.address}/blobs/{each['oid']}", "header": {}}}}
            for each in (await request.json())["objects"]
        ]
        return JSONResponse({"transfer": "basic", "objects": objects})

    async def _blob(self, request):
        content = await request.body()
        assert hashlib.sha256(content).hexdigest() == request.path_params["digest"]
        self.blobs[request.path_params["digest"]] = content
        return Response(status_code=200)

    async def _commit(self, request):
        assert self._known(request)
        if self.refuses is not None:
            return JSONResponse({"error": "not today"}, status_code=self.refuses)
        place = request.path_params
        name = f"{place['owner']}/{place['name']}"
        files = self.files.setdefault((name, place["branch"]), {})
        for line in (await request.body()).splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]
        return JSONResponse(
            {"success": True, "commitOid": "0f3a", "commitUrl": f"{self.address}/{name}/commit/0f3a"}
        )
