// An http handler: a block of rows is one POST, answered in one reply. See ../protocol.md.
//
//	[handlers.greet]
//	kind = "http"
//	url = "http://127.0.0.1:8080/greet"
//	secret = "whsec_…"          # checked here when MUSTER_SECRET is set
//
// Run it with: PORT=8080 MUSTER_SECRET=whsec_… go run docs/handlers/http_go.go
package main

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"
)

// What Muster sends, as far as this handler reads it.
type request struct {
	Batch struct {
		Context struct {
			Word string `json:"word"`
		} `json:"context"`
	} `json:"batch"`
	Rows []row `json:"rows"`
}

type row struct {
	Line           int             `json:"line"`
	Input          json.RawMessage `json:"input"`
	IdempotencyKey string          `json:"idempotency_key"`
}

type outcome struct {
	Line    int    `json:"line"`
	Outcome string `json:"outcome"`
	Result  any    `json:"result,omitempty"`
	Error   string `json:"error,omitempty"`
}

const mostBytes = 16 << 20

// handle is the work: one outcome for every row. Use row.IdempotencyKey to do things once: a row may come again.
func handle(row row, word string) outcome {
	var input struct {
		Name string `json:"name"`
	}
	if err := json.Unmarshal(row.Input, &input); err != nil || input.Name == "" {
		return outcome{Line: row.Line, Outcome: "failed", Error: "a row needs a name"}
	}
	if word == "" {
		word = "Hello"
	}
	greeting := map[string]string{"greeting": fmt.Sprintf("%s, %s!", word, input.Name)}
	return outcome{Line: row.Line, Outcome: "succeeded", Result: greeting}
}

// isSigned says whether the request was signed with the key, and not long ago (Standard Webhooks).
func isSigned(header http.Header, body []byte, key []byte) bool {
	seconds, err := strconv.ParseInt(header.Get("webhook-timestamp"), 10, 64)
	if err != nil || time.Since(time.Unix(seconds, 0)).Abs() > 5*time.Minute {
		return false
	}
	mac := hmac.New(sha256.New, key)
	fmt.Fprintf(mac, "%s.%d.%s", header.Get("webhook-id"), seconds, body)
	expected := "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil))
	for _, given := range strings.Fields(header.Get("webhook-signature")) {
		if hmac.Equal([]byte(given), []byte(expected)) {
			return true
		}
	}
	return false
}

func greet(key []byte) http.HandlerFunc {
	return func(reply http.ResponseWriter, asked *http.Request) {
		body, err := io.ReadAll(http.MaxBytesReader(reply, asked.Body, mostBytes))
		if err != nil {
			http.Error(reply, "the body cannot be read", http.StatusBadRequest)
			return
		}
		if key != nil && !isSigned(asked.Header, body, key) {
			http.Error(reply, "not signed", http.StatusUnauthorized)
			return
		}
		var block request
		if err := json.Unmarshal(body, &block); err != nil {
			http.Error(reply, err.Error(), http.StatusBadRequest)
			return
		}
		outcomes := make([]outcome, 0, len(block.Rows))
		for _, row := range block.Rows {
			outcomes = append(outcomes, handle(row, block.Batch.Context.Word))
		}
		reply.Header().Set("content-type", "application/json")
		if err := json.NewEncoder(reply).Encode(map[string]any{"rows": outcomes}); err != nil {
			log.Print(err) // Muster has gone, and will ask again
		}
	}
}

func main() {
	var key []byte
	if secret := os.Getenv("MUSTER_SECRET"); secret != "" {
		var err error
		if key, err = base64.StdEncoding.DecodeString(strings.TrimPrefix(secret, "whsec_")); err != nil {
			log.Fatal("MUSTER_SECRET is not base64: ", err)
		}
	}
	port := os.Getenv("PORT")
	if port == "" {
		port = "8080"
	}
	listener, err := net.Listen("tcp", "127.0.0.1:"+port)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("listening on", listener.Addr().(*net.TCPAddr).Port)
	http.HandleFunc("/greet", greet(key))
	log.Fatal(http.Serve(listener, nil))
}
