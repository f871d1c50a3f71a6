package talosapi_test

import (
	"encoding/base64"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	clientconfig "github.com/siderolabs/talos/pkg/machinery/client/config"
	"github.com/siderolabs/talos/pkg/machinery/role"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

// talosconfig writes a talosconfig for os:reader to a file, after change has modified it.
func (s *site) talosconfig(t *testing.T, change func(*clientconfig.Config, *clientconfig.Context)) string {
	t.Helper()

	config, err := s.cluster.Talosconfig(string(role.Reader))
	must(t, err)
	change(config, config.Contexts[config.Context])

	path := filepath.Join(t.TempDir(), "talosconfig")
	must(t, config.Save(path))

	return path
}

func TestTalosconfig_ConnectsToEveryMachine(t *testing.T) {
	s := newSite(t, clock.RealClock{})
	creds := talosapi.Talosconfig{Path: s.talosconfig(t, func(*clientconfig.Config, *clientconfig.Context) {})}

	for _, m := range s.cluster.Machines() {
		requireNodename(t, dial(t, creds, m), m.Nodename())
	}
}

func TestTalosconfig_IsReadForEachDial(t *testing.T) {
	s := newSite(t, clock.RealClock{})
	path := s.talosconfig(t, func(*clientconfig.Config, *clientconfig.Context) {})
	creds := talosapi.Talosconfig{Path: path}

	must(t, s.cluster.RotateCA(t.Context(), talostest.DropOldCA))
	requireRefused(t, dial(t, creds, s.worker))

	renewed, err := os.ReadFile(s.talosconfig(t, func(*clientconfig.Config, *clientconfig.Context) {}))
	must(t, err)
	must(t, os.WriteFile(path, renewed, 0o600))
	requireNodename(t, dial(t, creds, s.worker), s.worker.Nodename())
}

func TestTalosconfig_ErrorsNameFileContextAndField(t *testing.T) {
	s := newSite(t, clock.RealClock{})
	other := newSite(t, clock.RealClock{})

	foreign, err := other.cluster.Talosconfig(string(role.Reader))
	must(t, err)

	notPEM := base64.StdEncoding.EncodeToString([]byte("not PEM"))

	for name, c := range map[string]struct {
		change func(*clientconfig.Config, *clientconfig.Context)
		want   []string
	}{
		"no such context":       {func(c *clientconfig.Config, _ *clientconfig.Context) { c.Context = "nowhere" }, []string{`"nowhere"`}},
		"CA that is missing":    {func(_ *clientconfig.Config, c *clientconfig.Context) { c.CA = "" }, []string{`"ca"`, "reader@talostest"}},
		"CA not base64":         {func(_ *clientconfig.Config, c *clientconfig.Context) { c.CA = "%" }, []string{`"ca"`, "reader@talostest"}},
		"CA not PEM":            {func(_ *clientconfig.Config, c *clientconfig.Context) { c.CA = notPEM }, []string{`"ca"`, "reader@talostest"}},
		"certificate not there": {func(_ *clientconfig.Config, c *clientconfig.Context) { c.Crt = "" }, []string{`"crt"`, "reader@talostest"}},
		"certificate not PEM":   {func(_ *clientconfig.Config, c *clientconfig.Context) { c.Crt = notPEM }, []string{`"crt"`, "reader@talostest"}},
		"key not base64":        {func(_ *clientconfig.Config, c *clientconfig.Context) { c.Key = "%" }, []string{`"key"`, "reader@talostest"}},
		"key not PEM":           {func(_ *clientconfig.Config, c *clientconfig.Context) { c.Key = notPEM }, []string{`"key"`, "reader@talostest"}},
		"key of another certificate": {
			func(_ *clientconfig.Config, c *clientconfig.Context) { c.Key = foreign.Contexts[foreign.Context].Key },
			[]string{`"crt"`, `"key"`, "reader@talostest"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			path := s.talosconfig(t, c.change)

			_, err := talosapi.Talosconfig{Path: path}.TLSConfig()
			if err == nil {
				t.Fatal("no error")
			}

			for _, part := range append(c.want, path) {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%q does not contain %s", err, part)
				}
			}
		})
	}
}

func TestTalosconfig_DoesNotCreateMissingFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "nowhere", "talosconfig")

	if _, err := (talosapi.Talosconfig{Path: path}).TLSConfig(); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), path) {
		t.Errorf("got %v", err)
	}

	if _, err := os.Stat(filepath.Dir(path)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("directory was created: %v", err)
	}
}

func TestTalosconfig_RejectsMalformedFile(t *testing.T) {
	for name, content := range map[string]string{
		"not YAML":                  "\t",
		"context without any field": "context: a\ncontexts:\n  a:\n",
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "talosconfig")
			must(t, os.WriteFile(path, []byte(content), 0o600))

			if _, err := (talosapi.Talosconfig{Path: path}).TLSConfig(); err == nil || !strings.Contains(err.Error(), path) {
				t.Errorf("got %v", err)
			}
		})
	}
}
