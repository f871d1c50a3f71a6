package main

import (
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/talos-ccm/talos-ccm/pkg/config"
)

func newConfigCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Validate configuration files and print their schema",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newConfigValidateCommand(), newConfigSchemaCommand())

	return cmd
}

func newConfigValidateCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "validate FILE|-",
		Short: "Validate a configuration file",
		Long: `Validate a configuration file, or standard input, as talos-ccm does when it loads it.

If the file is valid, print a summary and exit with 0. Otherwise print every
error to standard error, one per line with its position, and exit with 1.`,
		Example: `  talos-ccm config validate rules.yaml
  talos-ccm config validate - < rules.yaml`,
		Args:          cobra.ExactArgs(1),
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			name, data, err := readConfig(cmd.InOrStdin(), args[0])
			if err != nil {
				return err
			}

			compiled, err := config.Parse(name, data)
			if err != nil {
				fmt.Fprintln(cmd.ErrOrStderr(), err)

				return fmt.Errorf("%s is invalid", name)
			}

			fmt.Fprintf(cmd.OutOrStdout(), "%s: %s\n", name, compiled)

			return nil
		},
	}
}

func newConfigSchemaCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "schema",
		Short: "Print the JSON schema of the configuration file",
		Long: `Print the JSON schema of the configuration file.

Editors with a YAML language server validate and complete a file that starts with
"# yaml-language-server: $schema=./schema.json".`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := cmd.OutOrStdout().Write(config.Schema)

			return err
		},
	}
}

// readConfig reads a file, or stdin for "-". It reads at most one byte more than config.Parse accepts.
func readConfig(stdin io.Reader, file string) (name string, data []byte, err error) {
	if name = file; file == "-" {
		name = "stdin"
	}

	if data, err = readInput(stdin, file, config.MaxSize+1); err != nil {
		return name, nil, err
	}

	return name, data, config.CheckNotEmpty(name, data)
}

// readInput reads at most limit bytes of a file, or of stdin for "-".
func readInput(stdin io.Reader, file string, limit int64) ([]byte, error) {
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		defer f.Close() //nolint:errcheck // nothing was written

		stdin = f
	}

	return io.ReadAll(io.LimitReader(stdin, limit))
}
