// Go's net/http: ADDRESS KEY FILE; what it makes of a node, as JSON. See stock_http.py.

package main

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"os"
)

const echo, stream = "/functions/f/invoke", "/functions/s/invoke"

var address, key, file = os.Args[1], os.Args[2], os.Args[3]
var value, large = []byte(`{"a": [1, "é"]}`), bytes.Repeat([]byte("a"), 20<<20)

type headers map[string]string

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func told(name string, status int, text string) {
	line, err := json.Marshal(map[string]any{name: []any{status, text}})
	must(err)
	fmt.Println(string(line))
}

func call(method, path string, body io.Reader, more headers) *http.Response {
	request, err := http.NewRequest(method, "http://"+address+path, body)
	must(err)
	request.Header.Set("Authorization", "Bearer "+key)
	for name, each := range more {
		request.Header.Set(name, each)
	}
	answer, err := http.DefaultClient.Do(request)
	must(err)
	return answer
}

func ask(name, method, path string, body io.Reader, more headers) {
	answer := call(method, path, body, more)
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	must(err)
	told(name, answer.StatusCode, string(text))
}

func main() {
	kind, octets := headers{"Content-Type": "application/json"}, headers{"Content-Type": "application/octet-stream"}
	with := func(name, each string) headers {
		return headers{"Content-Type": "application/octet-stream", name: each}
	}
	var packed, form bytes.Buffer
	packer := gzip.NewWriter(&packed)
	packer.Write(value)
	must(packer.Close())
	writer := multipart.NewWriter(&form)
	part, err := writer.CreateFormFile("file", "a.bin")
	must(err)
	part.Write(large)
	must(writer.Close())
	asked := []struct {
		name, method, path string
		body               io.Reader
		more               headers
	}{
		{"json", "POST", echo, bytes.NewReader(value), kind},
		{"upload", "POST", echo, bytes.NewReader(large), octets},
		{"chunked", "POST", echo, io.MultiReader(bytes.NewReader(large)), octets},
		{"form", "POST", echo, &form, headers{"Content-Type": writer.FormDataContentType()}},
		{"413", "POST", echo, bytes.NewReader(append(large, large...)), octets},
		{"404", "POST", "/functions/none/invoke", bytes.NewReader(large), octets},
		{"401", "POST", echo, bytes.NewReader(large), with("Authorization", "Bearer dm_0_0")},
		{"415", "POST", echo, bytes.NewReader(large), with("Content-Encoding", "br")},
		{"gzip", "POST", echo, &packed, headers{"Content-Type": "application/json", "Content-Encoding": "gzip"}},
		{"head", "HEAD", "/healthz", nil, nil},
		{"slash", "POST", echo + "/", bytes.NewReader(value), kind},
		{"empty", "POST", echo, bytes.NewReader([]byte(`"nothing"`)), kind},
	}
	for _, each := range asked {
		ask(each.name, each.method, each.path, each.body, each.more)
		ask("after "+each.name, "POST", echo, bytes.NewReader(value), kind)
	}
	answer := call("POST", stream, bytes.NewReader([]byte(`"`+file+`"`)), kind)
	room := make([]byte, 1024)
	nbytes, err := answer.Body.Read(room)
	must(err)
	told("first part", answer.StatusCode, string(room[:nbytes]))
	must(os.WriteFile(file, nil, 0o644))
	rest, err := io.ReadAll(answer.Body)
	must(err)
	told("rest", answer.StatusCode, string(rest))
}
