package talosapi_test

import (
	"encoding/base64"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	clientconfig "github.com/siderolabs/talos/pkg/machinery/client/config"
	"github.com/siderolabs/talos/pkg/machinery/role"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

// talosconfig writes a talosconfig for os:reader to a file, after change has modified it.
func (s *site) talosconfig(t *testing.T, change func(*clientconfig.Config, *clientconfig.Context)) string {
	t.Helper()

	config, err := s.cluster.Talosconfig(string(role.Reader))
	require.NoError(t, err)
	change(config, config.Contexts[config.Context])

	path := filepath.Join(t.TempDir(), "talosconfig")
	require.NoError(t, config.Save(path))

	return path
}

func TestTalosconfig_IsReadForEachDial(t *testing.T) {
	s := newSite(t, clock.RealClock{})
	path := s.talosconfig(t, func(*clientconfig.Config, *clientconfig.Context) {})
	creds := talosapi.Talosconfig{Path: path}

	require.NoError(t, s.cluster.RotateCA(talostest.DropOldCA))
	requireRefused(t, dial(t, creds, s.worker))

	renewed, err := os.ReadFile(s.talosconfig(t, func(*clientconfig.Config, *clientconfig.Context) {}))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, renewed, 0o600))
	requireNodename(t, dial(t, creds, s.worker), s.worker.Nodename())
}

func TestTalosconfig_ErrorsNameFileContextAndField(t *testing.T) {
	s := newSite(t, clock.RealClock{})
	other := newSite(t, clock.RealClock{})

	foreign, err := other.cluster.Talosconfig(string(role.Reader))
	require.NoError(t, err)

	notPEM := base64.StdEncoding.EncodeToString([]byte("not PEM"))

	for name, c := range map[string]struct {
		change func(*clientconfig.Config, *clientconfig.Context)
		want   []string
	}{
		"no such context":            {func(c *clientconfig.Config, _ *clientconfig.Context) { c.Context = "nowhere" }, []string{`"nowhere"`}},
		"CA that is missing":         {func(_ *clientconfig.Config, c *clientconfig.Context) { c.CA = "" }, []string{`"ca"`, `context "talostest"`}},
		"CA not base64":              {func(_ *clientconfig.Config, c *clientconfig.Context) { c.CA = "%" }, []string{`"ca"`, `context "talostest"`}},
		"CA not PEM":                 {func(_ *clientconfig.Config, c *clientconfig.Context) { c.CA = notPEM }, []string{`"ca"`, `context "talostest"`}},
		"certificate not there":      {func(_ *clientconfig.Config, c *clientconfig.Context) { c.Crt = "" }, []string{`"crt"`, `context "talostest"`}},
		"certificate not PEM":        {func(_ *clientconfig.Config, c *clientconfig.Context) { c.Crt = notPEM }, []string{`"crt"`, `context "talostest"`}},
		"key not base64":             {func(_ *clientconfig.Config, c *clientconfig.Context) { c.Key = "%" }, []string{`"key"`, `context "talostest"`}},
		"key not PEM":                {func(_ *clientconfig.Config, c *clientconfig.Context) { c.Key = notPEM }, []string{`"key"`, `context "talostest"`}},
		"key of another certificate": {func(_ *clientconfig.Config, c *clientconfig.Context) { c.Key = foreign.Contexts[foreign.Context].Key }, []string{`"crt"`, `"key"`, `context "talostest"`}},
	} {
		t.Run(name, func(t *testing.T) {
			path := s.talosconfig(t, c.change)

			_, err := talosapi.Talosconfig{Path: path}.TLSConfig()
			require.Error(t, err)

			for _, part := range append(c.want, path) {
				assert.ErrorContains(t, err, part)
			}
		})
	}
}

func TestTalosconfig_DoesNotCreateMissingFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "nowhere", "talosconfig")

	_, err := (talosapi.Talosconfig{Path: path}).TLSConfig()
	assert.ErrorIs(t, err, fs.ErrNotExist)
	assert.Contains(t, err.Error(), path)

	_, err = os.Stat(filepath.Dir(path))
	assert.ErrorIs(t, err, fs.ErrNotExist, "directory was created")
}

func TestTalosconfig_RejectsMalformedFile(t *testing.T) {
	for name, content := range map[string]string{
		"not YAML":                  "\t",
		"context without any field": "context: a\ncontexts:\n  a:\n",
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "talosconfig")
			require.NoError(t, os.WriteFile(path, []byte(content), 0o600))

			_, err := (talosapi.Talosconfig{Path: path}).TLSConfig()
			assert.ErrorContains(t, err, path)
		})
	}
}
