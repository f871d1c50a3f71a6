package main

import (
	"bytes"
	"os"
	"testing"
)

func TestWhatIsMadeIsCurrent(t *testing.T) {
	t.Chdir("../..")

	made, err := files()
	if err != nil {
		t.Fatal(err)
	}

	for name, want := range made {
		if got, err := os.ReadFile(name); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s is not current (%v): run go generate ./pkg/config", name, err)
		}
	}
}
